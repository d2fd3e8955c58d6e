"""`slipstream bench peer`: llama.cpp and us in one run on the same weights, turn by turn: decoding and reading prompts.

A model's own GGUF file, or for a shape a twin of the random weights that is written for the run. What else the machine
does hits both alike: ratios are medians over the turns, each of one turn's neighbours. With ``apart`` each has the
machine's memory for itself, one after the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from slipstream.bench.harness.cpu_share import OtherProcesses, warning
from slipstream.bench.harness.gguf_twin import write_stored, write_twin
from slipstream.bench.harness.llamacpp_peer import LlamaCppPeer, check_peer, open_peer
from slipstream.bench.harness.loaded_engine import SLACK, for_modes, loaded, with_room
from slipstream.bench.harness.report import check_writable, headline, write_report
from slipstream.bench.harness.traffic import TokenTimes, decode_rate, run_together
from slipstream.bench.harness.workload import prompts, stream_requests
from slipstream.bench.kinds.streams import longest
from slipstream.commands.options import ModelOptions, ReportOptions
from slipstream.commands.progress import say, shown
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.load.random.model import RandomCheckpoint
from slipstream.load.random.stored import StoredRandomCheckpoint
from slipstream.sampling import DraftSetting

Prompts = Sequence[Sequence[int]]
Answering = Callable[[Prompts, int], Sequence[TokenTimes]]  # to prompts, with so many tokens each
PEER = "llama.cpp"
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PeerSettings:
    streams: Sequence[int]
    modes: Sequence[DraftSetting] = ("off",)
    prompt: int | None = None  # tokens; None: real text where the model has any
    new: int = 64
    repeats: int = 5
    seed: int = 0
    apart: bool = False  # one after the other, for files of which memory holds one copy

    def __post_init__(self) -> None:
        if min(self.repeats, self.prompt or 1) < 1 or self.new < 2:
            raise ConfigError("prompt and repeats must be at least 1, new at least 2")


@dataclass(frozen=True, slots=True)
class PeerPace:
    """Tokens a second of all streams together, in one turn."""

    decode: float
    prompt: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One mode of ours beside llama.cpp: medians over the turns."""

    streams: int
    mode: str
    decode_tok_s: float
    peer_decode_tok_s: float
    decode_ratio: float
    prompt_tok_s: float
    peer_prompt_tok_s: float
    prompt_ratio: float
    decode_ratios: tuple[float, ...]  # turn by turn
    prompt_ratios: tuple[float, ...]
    others_cpu: float | None  # the share of the processors that other processes had meanwhile


def peer(options: ModelOptions, settings: PeerSettings, to: ReportOptions) -> int:
    check_writable(to)
    length = longest(options, settings.prompt) + settings.new
    rows: list[Compared] = []
    with gguf_of(options) as path:
        measure = _one_after_the_other if settings.apart else _by_turns
        for note, found in measure(options, path, settings, length):
            print("\n".join(map(_line, found)), flush=True)
            rows += found
            peer_note = note
    for sentence in filter(None, (f"{PEER}: {peer_note}", warning([row.others_cpu for row in rows]))):
        print(sentence)
    results = {"settings": asdict(settings), "peer": peer_note, "results": [asdict(row) for row in rows]}
    write_report("peer", options, to, results)
    return 0


def _of_file(options: ModelOptions, path: Path, settings: PeerSettings, length: int) -> ModelOptions:
    """With room for all streams. Types of quantised files are read from the very file that llama.cpp reads."""
    if options.stored_as is not None:
        options = replace(options, model=str(path), shape=None, random_weights=False, stored_as=None, vocab=None)
    return with_room(for_modes(options, settings.modes), [length] * max(settings.streams))


@contextmanager
def gguf_of(options: ModelOptions) -> Iterator[Path]:
    """A file with the weights that we run: the model's own, or one that is gone afterwards."""
    backend = options.backend
    if backend.device.kind != "cpu":
        raise ConfigError("llama.cpp runs on the CPU here: say --device cpu")
    model = options.open()
    if not isinstance(model.checkpoint, (RandomCheckpoint, StoredRandomCheckpoint)):
        check_peer(model.path)
        yield model.path
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder) / "twin.gguf"
        check_peer(path)
        say("writing the made-up weights into a GGUF file")
        if isinstance(model.checkpoint, StoredRandomCheckpoint):
            write_stored(model.checkpoint, path)
        else:
            write_twin(model.checkpoint, backend, path)
        yield path


Found = Iterator[tuple[str, list[Compared]]]  # llama.cpp's note, and a number of streams


def _by_turns(options: ModelOptions, path: Path, settings: PeerSettings, length: int) -> Found:
    with loaded(_of_file(options, path, settings, length)) as (llm, _):
        print(f"{headline(options, llm.engine.info)}\n{COLUMNS}")
        for count in settings.streams:
            given = prompts(llm, count, settings.prompt, settings.seed)
            with _other(path, count, length) as other:
                turns, disturbed = _turns(_all_ours(llm, settings) | {PEER: _theirs(other)}, given, settings, other)
                yield other.note, [compare(count, mode, turns, disturbed) for mode in map(str, settings.modes)]


def _one_after_the_other(options: ModelOptions, path: Path, settings: PeerSettings, length: int) -> Found:
    """A machine that changes its speed in between does so for one of them only."""
    ours: list[tuple[Prompts, Turns, float | None]] = []
    with loaded(_of_file(options, path, settings, length)) as (llm, _):
        info = llm.engine.info
        for count in settings.streams:
            given = prompts(llm, count, settings.prompt, settings.seed)
            ours.append((given, *_turns(_all_ours(llm, settings), given, settings)))
    print(f"{headline(options, info)}, one after the other\n{COLUMNS}")
    for count, (asked, turns, disturbed) in zip(settings.streams, ours, strict=True):
        with _other(path, count, length) as other:
            theirs, then = _turns({PEER: _theirs(other)}, asked, settings, other)
            both = [{**a, **b} for a, b in zip(turns, theirs, strict=True)]
            most = None if disturbed is None or then is None else max(disturbed, then)
            yield other.note, [compare(count, mode, both, most) for mode in map(str, settings.modes)]


@contextmanager
def _other(path: Path, count: int, length: int) -> Iterator[LlamaCppPeer]:
    with open_peer(path, count, True, length + SLACK) as other:
        assert other is not None
        yield other


Turns = list[dict[str, PeerPace]]


def _turns(
    sides: Mapping[str, Answering], given: Prompts, settings: PeerSettings, other: LlamaCppPeer | None = None
) -> tuple[Turns, float | None]:
    """By turn and side, and what share of the processors others than ``other`` and we had."""
    for answering in sides.values():
        answering(given, min(WARM_TOKENS, settings.new))
    others = OtherProcesses([] if other is None else [other.process.pid])
    turns: Turns = [{} for _ in range(settings.repeats)]
    order = [(turn, name) for turn in range(settings.repeats) for name in _rotated(list(sides), turn)]
    for turn, name in shown(order, f"{len(given)} streams"):
        turns[turn][name] = pace(sides[name], given, settings.new)
    return turns, others.share()


def _all_ours(llm: LLM, settings: PeerSettings) -> dict[str, Answering]:
    return {str(mode): _ours(llm, mode) for mode in settings.modes}


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    """Another one is first in each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _ours(llm: LLM, mode: DraftSetting) -> Answering:
    return lambda given, num_new: run_together(llm.engine, stream_requests(given, num_new, 0.0, mode))


def _theirs(other: LlamaCppPeer) -> Answering:
    return lambda given, num_new: other.generate(given, num_new, ignore_eos=True)


def pace(answering: Answering, given: Prompts, num_new: int) -> PeerPace:
    """Prompts by answers of one token, so that no stream decodes while another is still read."""
    return PeerPace(_decode_rate(answering(given, num_new)), prompt_rate(answering(given, 1), given))


def _decode_rate(streams: Sequence[TokenTimes]) -> float:
    rate = decode_rate(streams)
    if rate is None:
        raise ConfigError("some streams ended before others had begun: ask for more --new tokens")
    return rate


def prompt_rate(streams: Sequence[TokenTimes], given: Prompts) -> float:
    """All prompts' tokens over the time from the first submission until each stream had its first token."""
    seconds = max(each.first for each in streams) - min(each.submitted for each in streams)
    return round(sum(map(len, given)) / seconds, 2)


def compare(count: int, mode: str, turns: Sequence[dict[str, PeerPace]], others_cpu: float | None) -> Compared:
    ours, theirs = [turn[mode] for turn in turns], [turn[PEER] for turn in turns]
    decode = [round(a.decode / b.decode, 3) for a, b in zip(ours, theirs, strict=True)]
    prompt = [round(a.prompt / b.prompt, 3) for a, b in zip(ours, theirs, strict=True)]
    return Compared(
        count,
        mode,
        round(median(each.decode for each in ours), 2),
        round(median(each.decode for each in theirs), 2),
        round(median(decode), 3),
        round(median(each.prompt for each in ours), 2),
        round(median(each.prompt for each in theirs), 2),
        round(median(prompt), 3),
        tuple(decode),
        tuple(prompt),
        others_cpu,
    )


COLUMNS = (
    f"{'':>7}  {'':<9}{'decode tok/s':^28}{'prompts tok/s':^28}\n"
    f"{'streams':>7}  {'mode':<9}{'ours':>8}{PEER:>11}{'ratio':>7}  {'ours':>8}{PEER:>11}{'ratio':>7}"
)


def _line(row: Compared) -> str:
    decode = f"{row.decode_tok_s:>8.1f}{row.peer_decode_tok_s:>11.1f}{row.decode_ratio:>7.2f}"
    prompt = f"{row.prompt_tok_s:>8.1f}{row.peer_prompt_tok_s:>11.1f}{row.prompt_ratio:>7.2f}"
    disturbed = (
        f"  others had {100 * (row.others_cpu or 0):.0f} % of the processors" if warning([row.others_cpu]) else ""
    )
    return f"{row.streams:>7}  {row.mode:<9}{decode}  {prompt}{disturbed}"
