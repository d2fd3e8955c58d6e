"""The process that tries grammars. First line: the vocabulary. Every later one: a source.

The answer is its grammar text, or the reason against it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.grammar.build import Unusable, build
from slipstream.grammar.specs import Source
from slipstream.grammar.vocabulary import GuidanceVocabulary, by_bytes
from slipstream.host import NICENESS
from slipstream.workers.child import Answer, serve

MEMORY = 4 << 30


def start(described: dict[str, Any]) -> Answer:
    tokens = [token.encode("latin-1") for token in described["tokens"]]
    return partial(_answer, GuidanceVocabulary(tokens, described["special"], by_bytes(tokens)).compiled())


def _answer(tokenizer: Any, source: list[Any]) -> dict[str, str]:
    """`{"grammar": text}` or `{"error": why, "path": where}`."""
    try:
        return {"grammar": build(tokenizer, Source(*source))}
    except Unusable as error:
        return {"error": str(error), "path": error.path}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}", "path": ""}


if __name__ == "__main__":
    serve(start, memory=MEMORY, niceness=NICENESS)
