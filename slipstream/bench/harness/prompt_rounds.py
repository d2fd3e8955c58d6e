"""The result of a round of `slipstream bench prompts`, as a table for people and as a dict for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from slipstream.bench.harness.llamacpp_peer import LlamaCppAnswer
from slipstream.commands.text import percent
from slipstream.engine.stats import RequestStats
from slipstream.llm import Output
from slipstream.sampling import MAX_DEPTH

LEFT_OUT = ("rows", "tokens")  # too long for one line of JSON


@dataclass(frozen=True, slots=True)
class PromptRow:
    name: str
    pred: int
    draft: int
    acc: int
    tok_s: float


@dataclass(frozen=True, slots=True)
class PromptRound:
    """One pass over the prompts under one policy."""

    policy: str
    streams: int
    n_requests: int
    wall_s_total: float
    total_predicted: int
    total_draft: int = 0
    total_draft_accepted: int = 0
    accepted_per_position: tuple[float, ...] = ()
    decode_tok_s: float | None = None  # of one stream, after its first token
    rows: tuple[PromptRow, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def tok_s(self) -> float:
        return self.total_predicted / self.wall_s_total


def summarise(policy: str, count: int, wall: float, names: Sequence[str], outputs: Sequence[Output]) -> PromptRound:
    stats = [output.stats for output in outputs]
    return PromptRound(
        policy,
        count,
        len(outputs),
        round(wall, 3),
        sum(s.output_tokens for s in stats),
        sum(s.draft_tokens for s in stats),
        sum(s.accepted_tokens for s in stats),
        accepted_by_position(stats),
        _decode_rate([(s.output_tokens, s.total_seconds - (s.first_token_seconds or 0.0)) for s in stats]),
        tuple(_row(name, s) for name, s in zip(names, stats, strict=True)),
        tuple(output.token_ids for output in outputs),
    )


def accepted_by_position(stats: Sequence[RequestStats]) -> tuple[float, ...]:
    """Of the drafts verified at positions 1, 2, ..., the share that was accepted."""
    drafted = _by_position([s.drafted_per_position for s in stats])
    accepted = _by_position([s.accepted_per_position for s in stats])
    return tuple(round(a / d, 3) for a, d in zip(accepted, drafted) if d)


def _by_position(counts: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*(each + (0,) * (MAX_DEPTH - len(each)) for each in counts))]


def peer_round(policy: str, count: int, wall: float, answers: Sequence[LlamaCppAnswer]) -> PromptRound:
    total = sum(answer.num_tokens for answer in answers)
    rate = _decode_rate([(answer.num_tokens, answer.decode_seconds) for answer in answers])
    return PromptRound(policy, count, len(answers), round(wall, 3), total, decode_tok_s=rate)


def _decode_rate(streams: Sequence[tuple[int, float]]) -> float | None:
    """From each stream's tokens and the seconds after its first one."""
    seconds = sum(seconds for _, seconds in streams)
    tokens = sum(num_tokens - 1 for num_tokens, _ in streams)
    return round(tokens / seconds, 1) if seconds and tokens > 0 else None


def _row(name: str, stats: RequestStats) -> PromptRow:
    rate = stats.output_tokens / stats.total_seconds
    return PromptRow(name, stats.output_tokens, stats.draft_tokens, stats.accepted_tokens, round(rate, 1))


def fastest(rounds: Sequence[PromptRound]) -> list[PromptRound]:
    """The best round of each policy, in the order they came."""
    names = dict.fromkeys(r.policy for r in rounds)
    return [min((r for r in rounds if r.policy == name), key=lambda r: r.wall_s_total) for name in names]


def differences(rounds: Sequence[PromptRound]) -> list[str]:
    """A sentence for each policy whose tokens are not those of "off" (or of the first one, if "off" did not run)."""
    ours = [r for r in rounds if r.tokens]
    base = next((r for r in ours if r.policy == "off"), ours[0])
    return [_difference(base, r) for r in ours if r.tokens != base.tokens]


def _difference(base: PromptRound, other: PromptRound) -> str:
    pairs = zip(base.rows, base.tokens, other.tokens, strict=True)
    names = dict.fromkeys(row.name for row, ours, theirs in pairs if ours != theirs)
    return (
        f"WRONG: with {base.streams} streams the tokens of {other.policy} are not those of {base.policy} "
        f"for {', '.join(names)}"
    )


def print_table(rounds: Sequence[PromptRound], reason: str) -> None:
    """``rounds``: all with the same number of streams."""
    best = fastest(rounds)
    count = best[0].streams
    for drafting in (r for r in best if r.total_draft and count == 1):
        _print_prompts(drafting)
    print(f"\n{best[0].n_requests} prompts, {count} at a time")
    print(f"{'policy':<12}{'tokens':>8}{'tok/s':>8}{'/ off':>8}{'decode':>8}{'accepted':>10}  by position")
    for each in best:
        print(_line(each, against_off(each.policy, rounds)))
    print(f"decode: tokens a second of one stream after its first token\nspeculation: {reason}", flush=True)


def _print_prompts(drafting: PromptRound) -> None:
    print(f"\n{drafting.policy:<18}{'pred':>6}{'draft':>7}{'acc':>6}{'rate':>7}{'tok/s':>8}")
    for row in drafting.rows:
        rate = percent(row.acc, row.draft)
        print(f"{row.name:<18}{row.pred:>6}{row.draft:>7}{row.acc:>6}{rate:>7}{row.tok_s:>8.1f}")


def _line(each: PromptRound, ratio: float | None) -> str:
    against = f"{ratio:.2f}" if ratio else "-"
    decode = f"{each.decode_tok_s:.1f}" if each.decode_tok_s else "-"
    accepted = percent(each.total_draft_accepted, each.total_draft)
    positions = " ".join(f"{100 * rate:.0f} %" for rate in each.accepted_per_position)
    line = f"{each.policy:<12}{each.total_predicted:>8}{each.tok_s:>8.1f}{against:>8}{decode:>8}{accepted:>10}"
    return f"{line}  {positions}".rstrip()


def against_off(policy: str, rounds: Sequence[PromptRound]) -> float | None:
    """The median over the turns of its pace over that of "off" in the same turn: a slow minute hits both."""
    ours, plain = ([r.tok_s for r in rounds if r.policy == name] for name in (policy, "off"))
    return median(a / b for a, b in zip(ours, plain)) if plain else None


def report(rounds: Sequence[PromptRound]) -> list[dict[str, object]]:
    """The fastest round of each policy. ``rounds``: all with the same number of streams."""
    return [_as_dict(each, against_off(each.policy, rounds)) for each in fastest(rounds)]


def _as_dict(each: PromptRound, ratio: float | None) -> dict[str, object]:
    return {
        **{key: value for key, value in asdict(each).items() if key not in LEFT_OUT},
        "aggregate_accept_rate": round(each.total_draft_accepted / max(1, each.total_draft), 4),
        "tok_s": round(each.tok_s, 1),
        "against_off": round(ratio, 3) if ratio else None,
    }
