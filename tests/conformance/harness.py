"""Opens runners on tiny checkpoints and drives them through the engine's own scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import RowJoin, Runner, StepPlan, StepResult, TokenLogprobs
from slipstream.engine.request import Request, TokenEvent
from slipstream.engine.scheduler import Scheduler
from slipstream.load import OpenedModel, open_model
from slipstream.load.hf.folder import open_hf
from slipstream.runners.cuda.model.fp8 import Fp8StoredFormat
from slipstream.runners.cuda.model.quantized import CudaStoredFormat, quantized_format
from slipstream.runners.cuda.platform import cuda_platform
from slipstream.runners.cuda.runner import CudaRunner
from slipstream.runners.host.runner import HostRunner
from slipstream.runners.rows import RowSpan
from slipstream.runners.torch.backend import TorchBackend
from slipstream.runners.torch.host_model import TorchModel
from slipstream.runners.torch.loading import TorchRunner, load_runner
from slipstream.sampling import DraftSetting, SamplingParams
from slipstream.speculate.by_request import make_policy
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy, DraftRequest, Load, SamplingRow


def open_runner(
    folder: Path,
    *,
    head: bool = False,
    streams: int = 4,
    block_size: int = 8,
    dtype: str = "float32",
    kernels: bool = False,
    kv_memory: int | None = None,
    max_depth: int = 4,
    device: str = "cpu",
    cache_host: int | None = None,
    kv_dtype: str = "auto",
) -> TorchRunner:
    checkpoint = open_hf(folder)
    engine = EngineConfig(max_streams=streams, block_size=block_size, max_depth=max_depth, cache_host=cache_host)
    config = RunnerConfig(device, dtype, kv_memory, draft_vocab=0, kernels=kernels, kv_dtype=kv_dtype)
    model = OpenedModel("tiny", folder, checkpoint, checkpoint if head else None, "" if head else "no head")
    runner = TorchBackend(config).load(model, engine)
    assert isinstance(runner, HostRunner)
    return runner


def open_gguf_runner(
    path: Path,
    *,
    mtp: Path | None = None,
    dtype: str = "float32",
    kernels: bool = False,
    streams: int = 4,
    kv_dtype: str = "auto",
) -> TorchRunner:
    """With the head that the file has, or that is beside it."""
    engine = EngineConfig(max_streams=streams, block_size=8, max_depth=4)
    config = RunnerConfig("cpu", dtype, 4_000_000, draft_vocab=0, kernels=kernels, kv_dtype=kv_dtype)
    runner = TorchBackend(config).load(open_model(str(path), str(mtp) if mtp else None), engine)
    assert isinstance(runner, HostRunner)
    return runner


def open_resident(
    folder: Path,
    *,
    streams: int = 4,
    block_size: int = 8,
    max_depth: int = 4,
    dtype: str = "float32",
    rounded: str | None = None,
    kv_dtype: str = "auto",
    state_dtype: str = "float32",
    draft_vocab: int = 0,
) -> CudaRunner:
    """The runner whose rows live on the device: on a GPU, or on the CPU in Triton's interpreter.

    ``rounded``: how matrices are stored, whatever the type of activations: int8, int4, or as in the file, the latter
    also with products that round activations to FP8.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if folder.is_file():  # a GGUF with its head
        model = open_model(str(folder))
        checkpoint = model.checkpoint
    else:
        checkpoint = open_hf(folder)
        model = OpenedModel("tiny", folder, checkpoint, checkpoint, "")
    engine = EngineConfig(max_streams=streams, block_size=block_size, max_depth=max_depth)
    more = {"max_context": 256, "draft_vocab": draft_vocab}
    config = RunnerConfig(device.type, dtype, 4_000_000, **more, state_dtype=state_dtype)
    platform = cuda_platform(device, config, checkpoint.spec)
    if kv_dtype == "fp8":
        platform = platform.with_coded_kv()
    if rounded:
        forms = {"stored": CudaStoredFormat, "stored, activations in fp8": Fp8StoredFormat}
        form = forms[rounded](platform.ops) if rounded in forms else quantized_format(platform.ops, rounded)
        platform = replace(platform, form=form, head_form=form)
    runner = load_runner(model, engine, config, platform)
    assert isinstance(runner, CudaRunner)
    return runner


def target_logits(runner: TorchRunner, tokens: list[int], feeds: list[int], slot: int = 1) -> torch.Tensor:
    """Logits at every position, the prompt fed in pieces into scattered blocks. [tokens, vocab]"""
    model = runner.model
    assert isinstance(model, TorchModel)
    num_blocks = model.table.blocks.shape[1]
    order = torch.randperm(runner.info.num_blocks, generator=torch.Generator().manual_seed(0))
    model.join(RowJoin(slot, tuple(tokens), len(tokens), SamplingParams(), 0, 0.0))
    model.grow(slot, tuple(order[:num_blocks].tolist()))
    pieces, start = [], 0
    with model.stepping():
        for feed in feeds:
            batch = model.lay_out([RowSpan(slot, start, 0, feed)])
            pieces.append(model.logits(model.forward(tokens[start : start + feed], batch)))
            start += feed
    return torch.cat(pieces)


@dataclass(frozen=True)
class Ask:
    """One stream of a test's traffic."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0  # step before which it is added
    abort_at: int | None = None  # step before which it is aborted; of several answers, this one modulo their number
    n: int = 1  # answers to the prompt, with the seeds from params.seed on

    @property
    def each(self) -> list[Ask]:
        """Its answers as requests of their own."""
        seed = self.params.seed
        assert seed is not None
        return [replace(self, params=replace(self.params, seed=seed + i), n=1) for i in range(self.n)]


class LateRunner:
    """The runner's own results, handed over one step late: what a GPU does, for any runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info = replace(runner.info, lag=1)

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        return self._runner.collect()


class Limited:
    """A runner that claims fewer blocks, of another size: the scheduler preempts, the runner need not know why."""

    def __init__(self, runner: Runner, block_size: int, num_tokens: int) -> None:
        self._runner = runner
        num_blocks = -(-num_tokens // block_size)
        keep_grid = runner.info.keep_grid if block_size == runner.info.block_size else 0
        self.info = replace(runner.info, block_size=block_size, num_blocks=num_blocks, keep_grid=keep_grid)

    def submit(self, plan: StepPlan) -> None:
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        return self._runner.collect()


class Floored(DepthPolicy):
    """Another policy's depths, and floors in turn."""

    def __init__(self, policy: DepthPolicy, floors: Sequence[float]) -> None:
        self._policy = policy
        self._floors = itertools.cycle(floors)

    @property
    def reason(self) -> str:
        return self._policy.reason

    def why_plain(self, setting: DraftSetting | None) -> str:
        return self._policy.why_plain(setting)

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        return [
            replace(ask, threshold=next(self._floors), continue_threshold=next(self._floors))
            for ask in self._policy.decide(rows, load)
        ]


@dataclass
class Traffic:
    """Runs asks through a scheduler and a runner, step by step, and keeps what each stream got.

    A stream's key is its place among all answers to all asks.
    """

    runner: Runner
    config: EngineConfig
    floors: Sequence[float] = (0.0,)  # given to rows in turn, whatever their depth
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of the prompt, then of the output
    num_forks: int = 0
    finished: dict[str, TokenEvent] = field(default_factory=dict)

    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        policy = Floored(make_policy(self.config.draft, self.runner.info, 8, CostModel()), self.floors)
        scheduler = Scheduler(self.runner.info, policy, self.config)
        keys = [str(i) for i in range(sum(ask.n for ask in asks))]
        self.tokens = {key: [] for key in keys}
        self.logprobs = {key: [] for key in keys}
        self.finished = {}
        step = 0
        while scheduler.has_work or step <= max(ask.arrival for ask in asks):
            self._arrivals(scheduler, asks, step)
            plan = scheduler.schedule()
            if plan is not None:
                self.runner.submit(plan)
                self.num_forks += sum(join.start.num_computed > 0 for join in plan.joins)
            if scheduler.num_in_flight and (plan is None or scheduler.num_in_flight > self.runner.info.lag):
                self._take(scheduler.apply(self.runner.collect()))
            scheduler.check_integrity()
            step += 1
            assert step < 5000, "the traffic never ends"
        assert scheduler.snapshot().num_free_blocks == self.runner.info.num_blocks
        self.snapshot = scheduler.snapshot()
        return list(self.tokens.values())

    def _arrivals(self, scheduler: Scheduler, asks: Sequence[Ask], step: int) -> None:
        first = 0
        for ask in asks:
            if ask.arrival == step:
                scheduler.add(*(_request(str(first + i), one) for i, one in enumerate(ask.each)))
            if ask.abort_at == step:
                event = scheduler.abort(str(first + step % ask.n))
                self._take([event] if event else [])
            first += ask.n

    def _take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.tokens[event.request_id] += event.tokens
            self.logprobs[event.request_id] += event.prompt_logprobs + event.logprobs
            if event.finish_reason is not None:
                assert event.request_id not in self.finished, "two final events"
                self.finished[event.request_id] = event


def _request(key: str, ask: Ask) -> Request:
    params = ask.params
    assert params.seed is not None
    return Request(key, ask.prompt, params, params.seed, params.p_min or 0.0, frozenset(params.stop_token_ids))


def run_alone(runner: Runner, ask: Ask) -> Traffic:
    """The same request by itself, without drafting, never disturbed."""
    run = Traffic(runner, EngineConfig(max_streams=runner.info.num_slots))
    run.run([Ask(ask.prompt, replace(ask.params, draft="off"))])
    return run


def alone(runner: Runner, ask: Ask) -> list[int]:
    return run_alone(runner, ask).tokens["0"]
