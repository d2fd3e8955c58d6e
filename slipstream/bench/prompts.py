"""`slipstream bench prompts`: nine prompts at temperature 0, draft policies side by side in one run.

All policies run on one loaded engine, in turns, so that what else the machine does hits them alike; ratios are between
the fastest round of each. The tokens are the same for every policy, and that is checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.bench.nine import NINE_PROMPTS
from slipstream.bench.peer import Peer, open_peer
from slipstream.bench.report import check_writable, shown, tell
from slipstream.bench.rounds import Round, differences, fastest, peer_round, print_table, report, summarise
from slipstream.commands.options import ModelOptions, ReportOptions, load_llm
from slipstream.errors import ConfigError
from slipstream.llm import LLM
from slipstream.sampling import DraftSetting, SamplingParams

PEER = "llama.cpp"
WARM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What every policy is asked, with ``count`` streams at once."""

    names: tuple[str, ...]
    prompts: tuple[list[int], ...]
    count: int
    num_tokens: int

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.prompts) + self.num_tokens


def prompts(
    options: ModelOptions,
    policies: Sequence[DraftSetting],
    streams: Sequence[int],
    num_tokens: int,
    repeats: int,
    to: ReportOptions,
    *,
    peer: bool = False,
) -> int:
    if num_tokens < 1 or repeats < 1:
        raise ConfigError(f"tokens and repeats must be at least 1, not {num_tokens} and {repeats}")
    check_writable(to)
    best: list[Round] = []
    wrong: list[str] = []
    for count in streams:
        rounds = _at(replace(options, max_streams=count), policies, count, num_tokens, repeats, peer)
        best += fastest(rounds)
        wrong += differences(rounds)
    told: dict[str, object] = {"tokens": num_tokens, "repeats": repeats}
    tell("prompts", options, to, {**told, "same_tokens": not wrong, "results": report(best)})
    for sentence in dict.fromkeys(wrong):
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


def _at(
    options: ModelOptions,
    policies: Sequence[DraftSetting],
    count: int,
    num_tokens: int,
    repeats: int,
    with_peer: bool,
) -> list[Round]:
    """Every policy ``repeats`` times, in turns."""
    with load_llm(options) as llm:
        asked = questions(llm, count, num_tokens)
        with open_peer(llm.model.path, count, with_peer, asked.longest) as peer:
            _warm_up(llm, peer, asked, policies)
            turns = [*policies, *([PEER] if peer else [])] * repeats
            rounds = [_turn(llm, peer, asked, policy) for policy in shown(turns, f"{count} streams")]
            print_table(fastest(rounds), llm.speculation)
            if peer is not None:
                print(f"{PEER}: {peer.note}", flush=True)
    return rounds


def questions(llm: LLM, count: int, num_tokens: int) -> Asked:
    """The nine, repeated so that ``count`` streams stay busy most of the time."""
    repeated = list(NINE_PROMPTS.items()) * max(1, count // 2)
    encoded = tuple(llm.chat_tokens([{"role": "user", "content": text}]) for _, text in repeated)
    return Asked(tuple(name for name, _ in repeated), encoded, count, num_tokens)


def _warm_up(llm: LLM, peer: Peer | None, asked: Asked, policies: Sequence[DraftSetting]) -> None:
    num_tokens = min(WARM_TOKENS, asked.num_tokens)
    for policy in policies:
        llm.generate(asked.prompts[:1], SamplingParams(temperature=0.0, max_tokens=num_tokens, draft=policy))
    if peer is not None:
        peer.generate(asked.prompts[:1], num_tokens)


def _turn(llm: LLM, peer: Peer | None, asked: Asked, policy: DraftSetting | str) -> Round:
    if policy == PEER:
        assert peer is not None
        return _peer_turn(peer, asked)
    params = SamplingParams(temperature=0.0, max_tokens=asked.num_tokens, draft=policy)  # type: ignore[arg-type]
    began = time.perf_counter()
    if asked.count == 1:
        outputs = [llm.generate([tokens], params)[0] for tokens in asked.prompts]
    else:
        outputs = llm.generate(asked.prompts, params)
    return summarise(str(policy), asked.count, time.perf_counter() - began, asked.names, outputs)


def _peer_turn(peer: Peer, asked: Asked) -> Round:
    began = time.perf_counter()
    answers = peer.generate(asked.prompts, asked.num_tokens)
    return peer_round(PEER, asked.count, time.perf_counter() - began, answers)
