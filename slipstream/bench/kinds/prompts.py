"""`slipstream bench prompts`: nine prompts at temperature 0, draft policies side by side in one run.

All policies run on one loaded engine, in turns, so that what else the machine does hits them alike: prompt by prompt
where one stream runs at a time, all prompts together otherwise. The fastest round of each policy is shown; ratios are
medians over the turns. The tokens are the same for every policy, and that is checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.bench.harness.llamacpp_peer import LlamaCppAnswer, LlamaCppPeer, open_peer
from slipstream.bench.harness.mtp_bench_prompts import MTP_BENCH_PROMPTS
from slipstream.bench.harness.prompt_rounds import PromptRound, differences, peer_round, print_table, report, summarise
from slipstream.bench.harness.report import check_writable, write_report
from slipstream.commands.options import ModelOptions, ReportOptions, load_llm
from slipstream.commands.progress import Turns
from slipstream.errors import ConfigError
from slipstream.llm import LLM, Output
from slipstream.sampling import DraftSetting, SamplingParams

PEER = "llama.cpp"
Policy = DraftSetting | str  # PEER among them
WARM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PromptSet:
    """What every policy is prompt_set, with ``count`` streams at once."""

    names: tuple[str, ...]
    prompts: tuple[list[int], ...]
    count: int
    num_tokens: int

    @property
    def together(self) -> list[list[list[int]]]:
        """The prompts that are answered at once, in order."""
        return [[prompt] for prompt in self.prompts] if self.count == 1 else [list(self.prompts)]

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
    results: list[dict[str, object]] = []
    wrong: list[str] = []
    for count in streams:
        rounds = _at(replace(options, max_streams=count), policies, count, num_tokens, repeats, peer)
        results += report(rounds)
        wrong += differences(rounds)
    summary: dict[str, object] = {"tokens": num_tokens, "repeats": repeats}
    write_report("prompts", options, to, {**summary, "same_tokens": not wrong, "results": results})
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
) -> list[PromptRound]:
    """Every policy ``repeats`` times, in turns."""
    with load_llm(options, lines=True) as llm:
        prompt_set = questions(llm, count, num_tokens)
        with open_peer(llm.model.path, count, with_peer, prompt_set.longest) as peer:
            _warm_up(llm, peer, prompt_set, policies)
            every = [*policies, *([PEER] if peer else [])]
            total = repeats * len(prompt_set.together) * len(every)
            with Turns(f"{count} streams", total) as progress:
                rounds = [
                    each for turn in range(repeats) for each in _turn(llm, peer, prompt_set, every, turn, progress)
                ]
            print_table(rounds, llm.speculation)
            if peer is not None:
                print(f"{PEER}: {peer.note}", flush=True)
    return rounds


def questions(llm: LLM, count: int, num_tokens: int) -> PromptSet:
    """The nine, repeated so that ``count`` streams stay busy most of the time."""
    repeated = list(MTP_BENCH_PROMPTS.items()) * max(1, count // 2)
    encoded = tuple(llm.chat_tokens([{"role": "user", "content": text}]) for _, text in repeated)
    return PromptSet(tuple(name for name, _ in repeated), encoded, count, num_tokens)


def _warm_up(llm: LLM, peer: LlamaCppPeer | None, prompt_set: PromptSet, policies: Sequence[DraftSetting]) -> None:
    num_tokens = min(WARM_TOKENS, prompt_set.num_tokens)
    for policy in policies:
        llm.generate(prompt_set.prompts[:1], SamplingParams(temperature=0.0, max_tokens=num_tokens, draft=policy))
    if peer is not None:
        peer.generate(prompt_set.prompts[:1], num_tokens)


def _turn(
    llm: LLM,
    peer: LlamaCppPeer | None,
    prompt_set: PromptSet,
    policies: Sequence[Policy],
    turn: int,
    progress: Turns,
) -> list[PromptRound]:
    """A round of each policy. Another one is first in each turn."""
    walls = dict.fromkeys(policies, 0.0)
    outputs: dict[Policy, list[Output]] = {policy: [] for policy in policies}
    answers: list[LlamaCppAnswer] = []
    for i, prompts in enumerate(prompt_set.together, turn):
        first = i % len(policies)
        for policy in (*policies[first:], *policies[:first]):
            began = time.perf_counter()
            if policy == PEER:
                assert peer is not None
                answers += peer.generate(prompts, prompt_set.num_tokens)
            else:
                params = SamplingParams(temperature=0.0, max_tokens=prompt_set.num_tokens, draft=policy)  # type: ignore[arg-type]
                outputs[policy] += llm.generate(prompts, params)
            walls[policy] += time.perf_counter() - began
            progress.advance()
    return [
        peer_round(PEER, prompt_set.count, walls[policy], answers)
        if policy == PEER
        else summarise(str(policy), prompt_set.count, walls[policy], prompt_set.names, outputs[policy])
        for policy in policies
    ]
