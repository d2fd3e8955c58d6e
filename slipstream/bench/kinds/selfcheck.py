"""`slipstream selfcheck`: on this very machine, are the tokens right, what does a step cost, and does drafting pay?

Prints a report to paste into an issue: versions and the chip, never a host, a user or a path. Ends with 1 if a stream's
tokens depended on the other streams or on drafting.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream import __version__
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.commands.options import ModelOptions
from slipstream.commands.progress import LoadingBar, Turns, say, shown
from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner, StepCosts
from slipstream.engine.engine import grid
from slipstream.engine.request import Request
from slipstream.engine.scheduler import Scheduler
from slipstream.load import OpenedModel
from slipstream.sampling import SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel

STREAMS = (1, 4, 8)
DEPTH = 2
MAX_PROMPT = 24  # tokens: the check is of decoding
NUM_TOKENS = 48  # of each stream, unless chosen
SLOW_SECONDS = 0.05  # of a step of one token, from which on prompts and answers are shortened once more
SLOW_PROMPT = 6
SLOW_TOKENS = 8
KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True),
}
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """Some prompts answered together."""

    tokens: list[list[int]]
    seconds: float  # reading the prompts included
    num_steps: int  # with new tokens

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_steps


@dataclass(frozen=True, slots=True)
class Speed:
    streams: int
    plain: Run
    drafting: Run
    peer: float | None  # tokens a second of mlx-lm's own batches


@dataclass(frozen=True, slots=True)
class Findings:
    note: str  # what computes where
    drafts: str  # "" or why not
    different: dict[str, list[int]]  # by kind, the streams whose tokens were not their own
    num_streams: int
    num_tokens: int  # of each
    costs: StepCosts
    speeds: list[Speed]
    depth: int  # of the drafts

    @property
    def has_peer(self) -> bool:
        return any(speed.peer is not None for speed in self.speeds)

    @property
    def good(self) -> bool:
        return not any(self.different.values())


def selfcheck(options: ModelOptions, num_tokens: int | None) -> int:
    """``num_tokens``: of each stream; None: as many as this machine answers in minutes."""
    model = options.open()
    prompts = [model.tokenizer.encode(prompt)[:MAX_PROMPT] for prompt in MTP_BENCH_PROMPTS.values()]
    found = check(model, replace(options, max_streams=len(prompts)), prompts, num_tokens)
    print(report(model.name, found))
    return 0 if found.good else 1


def check(model: OpenedModel, options: ModelOptions, prompts: Prompts, chosen_tokens: int | None) -> Findings:
    longest = max(map(len, prompts)) + (chosen_tokens or NUM_TOKENS) + 32
    sized = replace(options, max_context=options.max_context or longest)
    runner = _load(model, sized)
    say("measuring what steps cost")
    max_tokens = len(prompts) * (1 + runner.info.max_depth)
    costs = runner.calibrate(grid(max_tokens), grid(len(prompts)))
    slow = bool(costs.verify) and costs.verify[0][1] > SLOW_SECONDS
    if slow:
        prompts = [prompt[:SLOW_PROMPT] for prompt in prompts]
    num_tokens = chosen_tokens or (SLOW_TOKENS if slow else NUM_TOKENS)
    depth = min(DEPTH, runner.info.max_depth)
    different = {kind: _different(runner, prompts, num_tokens, depth, params, kind) for kind, params in KINDS.items()}
    counts = [streams for streams in STREAMS if streams <= len(prompts)]
    pairs = [_pair(runner, prompts[:streams], num_tokens, depth) for streams in shown(counts, "speed")]
    info = runner.info
    del runner  # mlx-lm gets the memory
    peers = _peers(model, sized, prompts, num_tokens)
    speeds = [Speed(len(plain.tokens), plain, drafting, peers.get(len(plain.tokens))) for plain, drafting in pairs]
    return Findings(info.note, info.why_no_draft, different, len(prompts), num_tokens, costs, speeds, depth)


def _load(model: OpenedModel, options: ModelOptions) -> Runner:
    bar, total = LoadingBar(lines=True), model.num_bytes
    try:
        return options.backend.load(model, options.engine_config, None, lambda num_bytes: bar(num_bytes, total))
    finally:
        bar.close()


def run(runner: Runner, prompts: Prompts, params: SamplingParams) -> Run:
    """Through the engine's own scheduler, on this thread. A stream without a seed has its number."""
    config = EngineConfig(max_streams=runner.info.num_slots, max_step_tokens=max(512, 40 + runner.info.num_slots))
    scheduler = Scheduler(runner.info, make_policy("off", runner.info, config.max_depth, CostModel()), config)
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(str(i), tuple(prompt), params, i if params.seed is None else params.seed))
    tokens: list[list[int]] = [[] for _ in prompts]
    num_steps = 0
    began = time.perf_counter()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            runner.submit(plan)
        if scheduler.num_in_flight and (plan is None or scheduler.num_in_flight > runner.info.lag):
            events = scheduler.apply(runner.collect())
            num_steps += any(event.tokens for event in events)
            for event in events:
                tokens[int(event.request_id)] += event.tokens
    return Run(tokens, time.perf_counter() - began, num_steps)


def _different(
    runner: Runner, prompts: Prompts, num_tokens: int, depth: int, params: SamplingParams, kind: str
) -> list[int]:
    """Which streams got other tokens together and drafting than each alone and plain."""
    plain = replace(params, max_tokens=num_tokens, draft=0)
    found = []
    with Turns(f"equality, {kind}", 1 + len(prompts)) as progress:
        together = run(runner, prompts, replace(params, max_tokens=num_tokens, draft=depth)).tokens
        progress.advance()
        for i, got in enumerate(together):
            # By itself, but with the seed of its number.
            alone = run(runner, [prompts[i]], replace(plain, seed=i)).tokens[0]
            if got != alone:
                found.append(i)
            progress.advance()
    return found


def _pair(runner: Runner, prompts: Prompts, num_tokens: int, depth: int) -> tuple[Run, Run]:
    params = replace(KINDS["greedy"], max_tokens=num_tokens)
    return run(runner, prompts, replace(params, draft=0)), run(runner, prompts, replace(params, draft=depth))


def _peers(model: OpenedModel, options: ModelOptions, prompts: Prompts, num_tokens: int) -> dict[int, float]:
    """mlx-lm's own tokens a second, by streams; nothing where it is not what we run on."""
    peer = options.backend.library_peer(model)
    if peer is None:
        return {}
    rates = {}
    for streams in shown([streams for streams in STREAMS if streams <= len(prompts)], "mlx-lm"):
        tokens, seconds = peer.generate(prompts[:streams], num_tokens)
        rates[streams] = sum(map(len, tokens)) / seconds
    return rates


def report(name: str, found: Findings) -> str:
    """Markdown."""
    columns = ["streams", "plain tok/s", f"depth {found.depth} tok/s", "ratio", "tokens a step of all"]
    columns += ["mlx-lm's batches tok/s"] if found.has_peer else []
    lines = [
        f"### slipstream selfcheck: {'passed' if found.good else 'FAILED'}",
        "",
        f"- slipstream {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"- {name} on {found.note}; {'drafts with its head' if not found.drafts else found.drafts}",
        "",
        f"Together and drafting against alone and plain, {found.num_streams} streams of {found.num_tokens} tokens:",
        "",
        *[f"- {kind}: {_equality(found.num_streams, streams)}" for kind, streams in found.different.items()],
        "",
        f"A step by tokens: {_points(found.costs.verify)}  ",
        f"A draft pass by rows: {_points(found.costs.draft)}",
        "",
        _row(columns),
        "|---" * len(columns) + "|",
        *[_row(_speed_columns(speed)) for speed in found.speeds],
    ]
    if found.depth:
        always = f"Every step drafted {found.depth} deep, also where that does not pay"
        lines += ["", f"{always}: a server's `adaptive` would draft less there."]
    return "\n".join(lines)


def _equality(num_streams: int, different: Sequence[int]) -> str:
    if not different:
        return f"{num_streams} of {num_streams} equal"
    return f"{num_streams - len(different)} of {num_streams} equal; not {', '.join(map(str, different))}"


def _points(points: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{n}: {seconds * 1e3:.3g} ms" for n, seconds in points) or "-"


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _speed_columns(speed: Speed) -> list[str]:
    plain, drafting = speed.plain.rate, speed.drafting.rate
    peer = [] if speed.peer is None else [f"{speed.peer:.1f}"]
    rates = [f"{plain:.1f}", f"{drafting:.1f}", f"{drafting / plain:.2f}", f"{speed.drafting.tokens_a_step:.2f}"]
    return [str(speed.streams), *rates, *peer]
