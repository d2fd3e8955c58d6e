"""A model that computes nothing: every stream gets a token at a fixed pace, and its text is the time of its writing.

`PacedModel` is what a server loads (`Load` of server/service/model_holder.py): HTTP, protocols and engine are the real
ones. The text of a token is made on the event loop, just before the event is written. `python -m
slipstream.bench.hops.paced_model --port 8001` serves it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import models, pre_tokenizers

from slipstream.commands.text import show
from slipstream.config import EngineConfig
from slipstream.engine.contract import RowResult, RowStep, RunnerInfo, StepCosts, StepPlan, StepResult
from slipstream.engine.engine import Engine
from slipstream.load import Tokenizer
from slipstream.load.tokenizer.chat_template import ChatTemplate
from slipstream.load.tokenizer.token_bytes import BYTE_OF
from slipstream.server.http.lifecycle import Server
from slipstream.server.http.logs import set_up_logging
from slipstream.server.service.model_holder import LoadedModel
from slipstream.server.service.settings import ServerConfig
from slipstream.server.service.status import ModelFacts

PACE = 50.0  # tokens a second of each stream
STAMP = len(BYTE_OF)  # the one token that is ever sampled
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENGINE = EngineConfig(max_streams=256, max_step_tokens=4096, draft="off", prefix_cache=False)
CONTEXT = 1 << 16  # tokens; a byte of text is one
NUM_BLOCKS = 1 << 16


class StampTokenizer(Tokenizer):
    """Prompts are their bytes; the text of an answer's token is the time: "<nanoseconds>", of the monotonic clock."""

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        if token == STAMP:
            return b"<%d>" % time.monotonic_ns()
        return super().token_bytes(token, skip_special)


def stamp_tokenizer() -> StampTokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return StampTokenizer(backend, "byte_level", ChatTemplate({"default": TEMPLATE}, {}))


@dataclass(slots=True)
class _Row:
    num_known: int
    cursor: int = 0
    is_new: bool = True  # it has not sampled yet


class PacedRunner:
    """A step in which rows sample takes a fixed time, as a GPU's would; but one in which a row samples its first token
    takes none, so that the time to it is all the server's and the proxy's."""

    def __init__(self, info: RunnerInfo, pace: float) -> None:
        self.info = info
        self.host_memory = None
        self._seconds = 1.0 / pace
        self._ended = 0.0  # when the last step was to end
        self._rows: dict[int, _Row] = {}
        self._result = StepResult(0, ())
        self._waits = False

    def submit(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            del self._rows[slot]
        for join in plan.joins:
            self._rows[join.slot] = _Row(len(join.tokens))
        starting = {step.slot for step in plan.rows if self._rows[step.slot].is_new}
        self._result = StepResult(plan.step, tuple(map(self._run, plan.rows)))
        sampling = {row.slot for row in self._result.rows if row.tokens}
        self._waits = bool(sampling) and not sampling & starting

    def _run(self, step: RowStep) -> RowResult:
        row = self._rows[step.slot]
        num_fed = min(step.feed, row.num_known - row.cursor)
        row.cursor += num_fed
        samples = row.cursor == row.num_known
        row.num_known += samples
        row.is_new &= not samples
        return RowResult(step.slot, num_fed, (STAMP,) if samples else (), ())

    def collect(self) -> StepResult:
        now = time.monotonic()
        self._ended = max(now, self._ended + self._seconds) if self._waits else now
        time.sleep(self._ended - now)
        return self._result

    def calibrate(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> StepCosts:
        always = ((1, 1.0), (ENGINE.max_step_tokens, 1.0))  # prompts beside answers cost nothing: they are not held up
        return StepCosts(always, read=always)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class PacedModel:
    """A `Load`: call it with what to do when the engine dies. ``name``: tells servers apart in their answers."""

    pace: float = PACE
    name: str = "paced"
    config: EngineConfig = field(default=ENGINE)

    def __call__(self, on_death: Callable[[Exception], None]) -> LoadedModel:
        engine = Engine(self._runner, self.config, on_death=on_death)
        facts = ModelFacts(self.name, "none", "none", "paced", weight_bytes=0, kv_token_bytes=0, state_bytes=0)
        return LoadedModel(engine, stamp_tokenizer(), facts)

    def _runner(self) -> PacedRunner:
        info = RunnerInfo(
            num_slots=self.config.max_streams,
            num_blocks=NUM_BLOCKS,
            block_size=self.config.block_size,
            max_context=CONTEXT,
            vocab_size=STAMP + 1,
            max_depth=0,
            why_no_draft="it has no head",
            note=f"no device: {self.pace:g} tokens a second for each stream",
        )
        return PacedRunner(info, self.pace)


def main() -> None:
    parser = argparse.ArgumentParser(description="A server that answers at a fixed pace with the time of writing.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pace", type=float, default=PACE, help="tokens a second of each stream")
    parser.add_argument("--name", default="paced", help="the model's name in answers")
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--drain", type=float, default=30.0)
    args = parser.parse_args()
    set_up_logging("warning", "text")
    config = ServerConfig(args.host, args.port, tuple(args.api_key), drain_seconds=args.drain)
    model = PacedModel(args.pace, args.name)
    server = Server(config, model.config, model, lambda loaded: show(f"page    {server.address}"))
    show(f"listening on {server.address}, loading nothing")
    server.run()
    if server.error is not None:
        raise server.error


if __name__ == "__main__":
    main()
