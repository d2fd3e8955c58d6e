"""Before the first step, with ``--fp8-activations on``: which products round their activations to FP8.

Both ways are timed on this GPU for each shape and size, over several layers' matrices, so that weights come from memory
and not from a cache. Rounding must win by ``GAIN``: where both take as long, activations stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TypeVar

import torch

from slipstream.runners.cuda.drafter import CudaMtpDrafter
from slipstream.runners.cuda.graphs import Graphs
from slipstream.runners.cuda.model.fp8 import SIZES, Fp8Choice, Fp8Experts, Fp8Linear
from slipstream.runners.cuda.program import CudaProgram
from slipstream.runners.cuda.warmup import compile_together, recorded
from slipstream.runners.torch.models.qwen3_5_moe import SparseMlp

Part = TypeVar("Part", Fp8Linear, Fp8Experts)
GAIN = 0.95  # of the time without rounding, at most
MAX_LAYERS = 8  # timed together

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """The products of some layers' matrices of one shape with so many tokens."""

    shape: Hashable
    num_tokens: int
    run: Callable[[bool], None]  # whether activations are rounded
    choice: Fp8Choice


def choose_products(program: CudaProgram, graphs: Graphs) -> None:
    """Without captured steps nothing is timed, and the number of tokens alone decides."""
    if not graphs.enabled:
        return
    head = program.drafter.head if isinstance(program.drafter, CudaMtpDrafter) else None
    trials = partial(trials_of, (program.decoder, head), program.buffers.max_tokens)
    with recorded() as launches:
        for trial in trials():
            trial.run(False)
            trial.run(True)
    compile_together(launches, partial(torch.cuda.set_device, torch.cuda.current_device()))
    choose(trials(), graphs.seconds)


def choose(trials: Iterable[Trial], seconds: Callable[[Callable[[], None]], float]) -> None:
    for trial in trials:
        plain, rounding = (seconds(partial(trial.run, rounds)) for rounds in (False, True))
        rounds = rounding < GAIN * plain
        trial.choice.set(trial.shape, trial.num_tokens, rounds)
        times = (trial.shape, trial.num_tokens, plain * 1e6, rounding * 1e6)
        log.info("%s, %d tokens: %.0f us, with activations in FP8 %.0f: %s", *times, "taken" if rounds else "not taken")


def trials_of(model: object, max_tokens: int) -> Iterator[Trial]:
    """Sizes beyond ``max_tokens`` do not occur; the one that it falls into does."""
    last = next((at for at, size in enumerate(SIZES) if size >= max_tokens), len(SIZES) - 1)
    for size in SIZES[: last + 1]:
        num_tokens = min(size, max_tokens)
        for linears in _alike(part for part in parts_in(model) if isinstance(part, Fp8Linear)):
            yield _of_linears(linears, num_tokens)
        sparse = [part for part in parts_in(model) if isinstance(part, SparseMlp)]
        active = {id(part.experts): part.num_active for part in sparse}
        for stacks in _alike(part.experts for part in sparse if isinstance(part.experts, Fp8Experts)):
            yield _of_experts(stacks, num_tokens, active[id(stacks[0])])


def parts_in(part: object) -> Iterator[object]:
    """All dataclasses that a model is made of."""
    if isinstance(part, list | tuple):
        for each in part:
            yield from parts_in(each)
    elif is_dataclass(part) and not isinstance(part, type):
        yield part
        for field in fields(part):
            yield from parts_in(getattr(part, field.name))


def _alike(parts: Iterable[Part]) -> list[list[Part]]:
    found: dict[Hashable, list[Part]] = {}
    for part in parts:
        found.setdefault(part.shape, []).append(part)
    return [each[:MAX_LAYERS] for each in found.values()]


def _of_linears(linears: Sequence[Fp8Linear], num_tokens: int) -> Trial:
    first = linears[0]
    x = torch.randn(num_tokens, first.matrix.width, device=first.matrix.words.device).to(first.dtype)

    def run(rounds: bool) -> None:
        for linear in linears:
            linear.multiply(x, None, rounds)

    return Trial(first.shape, num_tokens, run, first.choice)


def _of_experts(stacks: Sequence[Fp8Experts], num_tokens: int, num_active: int) -> Trial:
    """Every token with experts of its own, as streams that have nothing in common."""
    first, device = stacks[0], stacks[0].down.words.device
    width, num_experts = first.gate_up.width, first.down.num_rows // first.gate_up.width
    x = torch.randn(num_tokens, width, device=device).to(torch.bfloat16)
    expert = torch.rand(num_tokens, num_experts, device=device).argsort(1)[:, :num_active].int().contiguous()
    positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)

    def run(rounds: bool) -> None:
        for stack in stacks:
            stack.multiply(x, expert, positions, rounds)

    return Trial(first.shape, num_tokens, run, first.choice)
