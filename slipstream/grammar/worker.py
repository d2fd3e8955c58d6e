"""The process that tries grammars: lines of JSON in, lines of JSON out. It may be killed at any moment.

First line: the vocabulary. Every later one: a source; the answer is its grammar text, or the reason against it.
Ends by itself when its parent does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.grammar.build import Unusable, build
from slipstream.grammar.specs import Source
from slipstream.grammar.vocabulary import GuidanceVocabulary, by_bytes
from slipstream.host import NICENESS

MEMORY = 4 << 30


def main() -> None:
    _be_modest()
    described = json.loads(sys.stdin.readline())
    tokens = [token.encode("latin-1") for token in described["tokens"]]
    tokenizer = GuidanceVocabulary(tokens, described["special"], by_bytes(tokens)).compiled()
    _write({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _exit_after(request["seconds"])
        began = time.process_time()
        answer = _answer(tokenizer, Source(*request["source"]))
        _write({**answer, "took": time.process_time() - began})
        _exit_after(0)


def _answer(tokenizer: Any, source: Source) -> dict[str, str]:
    try:
        return {"grammar": build(tokenizer, source)}
    except Unusable as error:
        return {"error": str(error), "path": error.path}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}", "path": ""}


def _write(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _exit_after(seconds: float) -> None:
    """The parent kills us in time; this is for a parent that was killed itself. 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)


def _be_modest() -> None:
    """Streams come first, and a grammar may not exhaust the machine's memory."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    # Linux may weigh whole sessions against each other, and this process has one of its own: that has to give way too.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))


if __name__ == "__main__":
    main()
