"""`slipstream bench prompts`: nine prompts at temperature 0, draft policies side by side in one run.

All policies run on one loaded engine, in turns, so that what else the machine does hits them alike; ratios are between
the fastest round of each. The text is the same for every policy, and that is checked.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from slipstream import __version__
from slipstream.bench.nine import NINE_PROMPTS
from slipstream.bench.peer import Peer, open_peer
from slipstream.commands.options import ModelOptions, load_llm
from slipstream.llm import LLM, Output
from slipstream.sampling import DraftSetting, SamplingParams

PEER = "llama.cpp"


@dataclass(frozen=True, slots=True)
class PromptRow:
    name: str
    pred: int
    draft: int
    acc: int
    rate: float
    tok_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the prompts under one policy."""

    policy: str
    streams: int
    wall_s_total: float
    total_predicted: int
    total_draft: int = 0
    total_draft_accepted: int = 0
    accepted_per_position: tuple[float, ...] = ()
    rows: tuple[PromptRow, ...] = ()

    @property
    def tok_s(self) -> float:
        return self.total_predicted / self.wall_s_total


def prompts(
    options: ModelOptions,
    policies: Sequence[DraftSetting],
    streams: Sequence[int],
    num_tokens: int,
    repeats: int,
    *,
    peer: bool = False,
    out: str | None = None,
) -> int:
    best: list[Round] = []
    for count in streams:
        best += _at(replace(options, max_streams=count), policies, count, num_tokens, repeats, peer)
    told = report(best)
    told |= {"model": options.model or "default", "tokens": num_tokens, "repeats": repeats, "host": host()}
    line = json.dumps(told)
    print(line)
    if out:
        with Path(out).open("a") as file:
            print(line, file=file)
    return 0


def _at(
    options: ModelOptions,
    policies: Sequence[DraftSetting],
    count: int,
    num_tokens: int,
    repeats: int,
    with_peer: bool,
) -> list[Round]:
    rounds: list[Round] = []
    with load_llm(options) as llm, open_peer(llm.model.path, count, with_peer) as peer:
        asked = questions(llm, count)
        warm_up(llm, asked, policies)
        turns = [policy for _ in range(repeats) for policy in (*policies, *([PEER] if peer else []))]
        for policy in tqdm(turns, desc=f"{count} streams", file=sys.stderr, leave=False):
            rounds.append(_turn(llm, peer, asked, policy, count, num_tokens))
        print_table(rounds, llm.speculation)
    return [min((r for r in rounds if r.policy == name), key=lambda r: r.wall_s_total) for name in _names(rounds)]


def _names(rounds: Sequence[Round]) -> list[str]:
    return list(dict.fromkeys(r.policy for r in rounds))


def questions(llm: LLM, count: int) -> list[tuple[str, list[int]]]:
    """The nine, repeated so that ``count`` streams stay busy most of the time."""
    nine = [(name, llm.chat_tokens([{"role": "user", "content": text}])) for name, text in NINE_PROMPTS.items()]
    return nine * max(1, count // 2)


def warm_up(llm: LLM, asked: Sequence[tuple[str, list[int]]], policies: Sequence[DraftSetting]) -> None:
    for policy in policies:
        llm.generate([tokens for _, tokens in asked[:1]], SamplingParams(temperature=0.0, max_tokens=32, draft=policy))


def _turn(
    llm: LLM,
    peer: Peer | None,
    asked: Sequence[tuple[str, list[int]]],
    policy: DraftSetting | str,
    count: int,
    num_tokens: int,
) -> Round:
    if policy == PEER:
        assert peer is not None
        began = time.perf_counter()
        total = peer.generate([tokens for _, tokens in asked], num_tokens)
        return Round(PEER, count, time.perf_counter() - began, total)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, draft=policy)  # type: ignore[arg-type]
    began = time.perf_counter()
    if count == 1:
        outputs = [llm.generate([tokens], params)[0] for _, tokens in asked]
    else:
        outputs = llm.generate([tokens for _, tokens in asked], params)
    return summarise(str(policy), count, time.perf_counter() - began, asked, outputs)


def summarise(
    policy: str, count: int, wall: float, asked: Sequence[tuple[str, list[int]]], outputs: Sequence[Output]
) -> Round:
    drafted = [sum(n) for n in zip(*(_padded(o.stats.drafted_per_position) for o in outputs))]
    accepted = [sum(n) for n in zip(*(_padded(o.stats.accepted_per_position) for o in outputs))]
    return Round(
        policy,
        count,
        wall,
        sum(o.stats.output_tokens for o in outputs),
        sum(o.stats.draft_tokens for o in outputs),
        sum(o.stats.accepted_tokens for o in outputs),
        tuple(round(a / d, 3) for a, d in zip(accepted, drafted) if d),
        tuple(_row(name, output) for (name, _), output in zip(asked, outputs, strict=True)),
    )


def _padded(counts: tuple[int, ...]) -> tuple[int, ...]:
    return counts + (0,) * (8 - len(counts))


def _row(name: str, output: Output) -> PromptRow:
    stats = output.stats
    rate = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0
    return PromptRow(
        name,
        stats.output_tokens,
        stats.draft_tokens,
        stats.accepted_tokens,
        round(rate, 3),
        round(stats.output_tokens / stats.total_seconds, 1),
    )


def print_table(rounds: Sequence[Round], reason: str) -> None:
    for name in _names(rounds):
        fastest = min((r for r in rounds if r.policy == name), key=lambda r: r.wall_s_total)
        if fastest.rows and fastest.streams == 1:
            print(f"\n{name}, 1 stream\n{'':<18}{'pred':>6}{'draft':>7}{'acc':>6}{'rate':>7}{'tok/s':>8}")
            for row in fastest.rows:
                print(f"{row.name:<18}{row.pred:>6}{row.draft:>7}{row.acc:>6}{row.rate:>7.3f}{row.tok_s:>8.1f}")
        position = f", accepted by position {fastest.accepted_per_position}" if fastest.total_draft else ""
        print(f"{name}: {fastest.streams} streams, {fastest.tok_s:.1f} tok/s{position}")
    print(f"speculation: {reason}", flush=True)


def report(best: Sequence[Round]) -> dict[str, object]:
    results = []
    for fastest in best:
        base = next((r for r in best if r.streams == fastest.streams and r.policy == "off"), None)
        results.append(
            {
                **{key: value for key, value in asdict(fastest).items() if key != "rows"},
                "n_requests": len(fastest.rows),
                "aggregate_accept_rate": round(fastest.total_draft_accepted / max(1, fastest.total_draft), 4),
                "tok_s": round(fastest.tok_s, 1),
                "against_off": round(fastest.tok_s / base.tok_s, 3) if base else None,
            }
        )
    return {"bench": "prompts", "results": results}


def host() -> dict[str, str]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "slipstream": __version__,
    }
