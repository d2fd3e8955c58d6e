"""The interface of a backend, one for each array library: all that commands and benchmarks know of the runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.config import EngineConfig
from slipstream.engine.contract import Runner
from slipstream.load import OpenedModel
from slipstream.load.random.model import RandomCheckpoint

Progress = Callable[[int], None]  # called with the bytes just read
GgufTensor = tuple[str, np.ndarray[Any, Any], str]  # name, bytes [..., out, bytes of a row], GGUF's type


def ignore_progress(num_bytes: int) -> None:
    """The default."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Computed before a weight is read; what caches are sized by. Bytes, unless the name says otherwise."""

    weights: int
    head: int
    kv_per_token: int
    state_per_stream: int  # recurrent layers, whatever the length
    workspace: int  # 0: not known before; it is left free
    process: int  # the interpreter, its libraries, the tokenizer; on a GPU its context and captured steps
    num_slots: int
    num_blocks: int
    block_size: int  # tokens
    max_context: int  # tokens
    num_states: int = 0  # recurrent states that the prefix cache may keep beside those of the streams
    kept_state: int = 0  # bytes of each
    num_host_blocks: int = 0  # the prefix cache's second tier, in host memory
    num_host_states: int = 0
    shared_pool: bool = True  # False: each slot has room of its own for max_context
    weights_note: str = ""  # what of them is stored otherwise than in the files, one line for people
    weight_parts: tuple[tuple[str, int], ...] = ()  # of the weights: load/contents.py's parts, where they are known
    kv_dtype: str = ""  # of keys and values, in words
    state_dtype: str = ""  # of recurrent states; "": there are none, or the runner does not tell
    prompt_tokens: int = 0  # read in one step where no stream decodes; 0: what a step may feed
    captured_tokens: int = 0  # steps that read prompts are captured up to so many tokens, where steps are captured
    row_buffers: int = 0  # that room, where the pool's blocks are copies beside it, for the prefix cache

    @property
    def kv_pool(self) -> int:
        return self.pool_tokens * self.kv_per_token

    @property
    def states(self) -> int:
        return self.num_slots * self.state_per_stream

    @property
    def kept_states(self) -> int:
        return self.num_states * self.kept_state

    @property
    def host_tier(self) -> int:
        """Of host memory, beside a GPU's own."""
        return self.num_host_blocks * self.block_size * self.kv_per_token + self.num_host_states * self.kept_state

    @property
    def caches(self) -> int:
        return self.kv_pool + self.row_buffers + self.states + self.kept_states

    @property
    def total(self) -> int:
        return self.process + self.weights + self.head + self.caches + self.workspace

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def streams_of(self, num_tokens: int) -> int:
        """How many streams of that length fit at once."""
        blocks = -(-num_tokens // self.block_size)
        return min(self.num_slots, self.num_blocks // blocks)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes that a step of one stream cannot avoid to move: the base of the bandwidth's limit."""

    dense: int  # weights of every step, the output matrix among them
    experts: int  # of all layers together, if all of them are chosen
    head_dense: int
    head_experts: int
    draft_output: int  # the part of the output matrix that a draft pass reads
    kv_per_token: int
    states: int  # of recurrent layers; read, and written as often
    expert_share: float  # of the experts, those that one token chooses


class PeakMemory(Protocol):
    """Watches from its making on."""

    def read(self) -> dict[str, int]:
        """Bytes, by kind."""
        ...


class Device(Protocol):
    """The hardware of a backend, as benchmarks see it."""

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``gpu``."""
        ...

    @property
    def name(self) -> str:
        """The maker's."""
        ...

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by the fastest of some large copies. Keeps no memory."""
        ...

    def release_memory(self) -> None:
        """Give back what is no longer used: the next model plans with what the device calls free."""

    def watch_memory(self) -> PeakMemory: ...


class LibraryPeer(Protocol):
    """The array library's own batched generation, to compare with."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Greedy tokens of each prompt, all running together, and the seconds it took, prompts included."""
        ...


class Backend(Protocol):
    """One array library on one device, with the operator's options. Making one loads nothing."""

    @property
    def name(self) -> str:
        """``torch`` or ``mlx``: the library, and its package."""
        ...

    @property
    def any_architecture(self) -> bool:
        """It runs folders whose architecture only the library knows."""
        ...

    @property
    def random_shapes(self) -> bool:
        """It makes up weights for a model that is only a shape."""
        ...

    @property
    def device(self) -> Device: ...

    def describe(self, model: OpenedModel) -> str:
        """What computes where, one line for people."""
        ...

    def plan_memory(self, model: OpenedModel, engine: EngineConfig, free: int | None = None) -> MemoryPlan:
        """From headers alone. ``free``: bytes of the device; None: as it reports.

        Raises ConfigError where the model and its streams do not fit.
        """
        ...

    def load(
        self,
        model: OpenedModel,
        engine: EngineConfig,
        plan: MemoryPlan | None = None,
        progress: Progress = ignore_progress,
    ) -> Runner:
        """For the thread that will use it. ``plan``: of this model; None: made here."""
        ...

    # For benchmarks.

    def step_traffic(self, model: OpenedModel) -> StepTraffic: ...

    def gguf_twin(self, checkpoint: RandomCheckpoint) -> Iterator[GgufTensor]:
        """The random weights of a shape as GGUF stores them. ConfigError for a dtype that GGUF does not have."""
        ...

    def library_peer(self, model: OpenedModel) -> LibraryPeer | None:
        """None where the library generates nothing itself."""
        ...
