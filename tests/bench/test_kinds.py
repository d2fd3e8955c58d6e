"""`slipstream bench step`, `load`, `prefill`, `start`, and `plan` for a device that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import LateRunner

from slipstream.bench.harness.plot import Chart, Series, nice_top
from slipstream.bench.harness.roofline import step_bytes
from slipstream.bench.harness.step_driver import Driver
from slipstream.bench.harness.traffic import percentile
from slipstream.bench.kinds.load import LoadSettings, schedule
from slipstream.cli import main
from slipstream.commands.options import ModelOptions
from slipstream.config import EngineConfig, RunnerConfig
from slipstream.engine.contract import StepPlan, StepResult
from slipstream.errors import ConfigError
from slipstream.load.random.model import open_random
from slipstream.runners.backend import StepTraffic
from slipstream.runners.torch.backend import TorchBackend

Bench = Callable[..., dict[str, Any]]

# ---- step ----


def test_step(bench: Bench) -> None:
    report = bench("step", "--rows", "1,3", "--depths", "0,2", "--steps", "3", "--context", "20")
    rows = report["results"]
    assert [(row["rows"], row["depth"], row["tokens"]) for row in rows] == [(1, 0, 1), (1, 2, 3), (3, 0, 3), (3, 2, 9)]
    for row in rows:
        assert row["verify_ms"] > 0
        assert (row["draft_ms"] is None) == (row["depth"] == 0)
        assert row["limit_ms"] == pytest.approx(row["must_move"] / report["copy_gb_s"] / 1e6, abs=2e-3)
        assert row["times_the_limit"] == pytest.approx(row["step_ms"] / row["limit_ms"], abs=1e-3)
        assert row["times_the_limit"] > 1.0
    one, one_drafting, three, three_drafting = (row["must_move"] for row in rows)
    assert one < three < three_drafting < 3 * one
    assert one < one_drafting < three_drafting


def test_caches_that_are_set_for_servers_are_left_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for cached prompts in the environment, or in slipstream.toml, is for every command."""
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    bench("step", "--rows", "1", "--depths", "0", "--steps", "1", "--context", "8")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_driver_reads_prompts_longer_than_a_step_and_keeps_its_slots_clean(late: bool) -> None:
    config = RunnerConfig(device="cpu", dtype="float32", kernels=False, simulate_acceptance=(1.0, 0.5))
    engine = EngineConfig(max_streams=3, max_depth=2, max_step_tokens=40)
    runner = TorchBackend(config).load(open_random("tiny"), engine)
    driver = Driver(LateRunner(runner) if late else runner, 16, 40)
    for num_rows, depth in ((3, 2), (1, 0), (2, 1)):
        assert driver.measure(num_rows, depth, 3).tokens == num_rows * (1 + depth)
        assert not runner.rows
    with pytest.raises(ConfigError, match="do not fit"):
        driver.measure(3, 2, 10_000)


class Device(LateRunner):
    """Takes a second of the host for each submit and then, behind the steps before, three of its own."""

    now = free = 0.0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.now += 1.0
        self.free = max(self.free, self.now) + 3.0
        self.ends = [*getattr(self, "ends", []), self.free]

    def collect(self) -> StepResult:
        self.now = max(self.now, self.ends.pop(0))
        return super().collect()


def test_filling_the_pipeline_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunnerConfig(device="cpu", dtype="float32", kernels=False)
    device = Device(TorchBackend(config).load(open_random("tiny"), EngineConfig(max_streams=1, max_depth=1)))
    monkeypatch.setattr("slipstream.bench.harness.step_driver.time", SimpleNamespace(perf_counter=lambda: device.now))
    assert Driver(device, 16, 8).measure(1, 0, 4).step_ms == 3000.0


def traffic(shape: str, **more: Any) -> StepTraffic:
    model, config = open_random(shape), RunnerConfig(device="cuda", **more)
    return TorchBackend(config, present=False).step_traffic(model)


def test_the_bytes_of_a_plain_step_are_the_weights_without_the_table() -> None:
    large = traffic("qwen3.5-27b", draft_vocab=0)
    assert step_bytes(large, 1, 0, 0) == pytest.approx(51.25e9 + 2 * 151e6, rel=0.002)
    assert step_bytes(large, 1, 0, 1000) - step_bytes(large, 1, 0, 0) == 1000 * large.kv_per_token
    assert step_bytes(large, 1, 1, 0) - step_bytes(large, 1, 0, 0) == pytest.approx(3.4e9, rel=0.02)
    halved = traffic("qwen3.5-27b", draft_vocab=248320 // 2)
    assert step_bytes(large, 1, 3, 0) - step_bytes(halved, 1, 3, 0) == pytest.approx(
        3 * 248320 / 2 * 5120 * 2, rel=1e-6
    )


def test_rows_share_the_weights_but_not_their_contexts() -> None:
    large = traffic("qwen3.5-27b")
    own = 1000 * large.kv_per_token + 2 * large.states
    assert step_bytes(large, 8, 0, 1000) - step_bytes(large, 1, 0, 1000) == 7 * own
    assert step_bytes(large, 8, 3, 1000) - step_bytes(large, 1, 3, 1000) == 7 * own
    sparse = traffic("qwen3.5-35b-a3b")
    weights = step_bytes(sparse, 8, 0, 0) - 8 * 2 * sparse.states
    assert weights == pytest.approx(sparse.dense + sparse.experts * (1 - (1 - 8 / 256) ** 8), rel=1e-6)


def test_matrices_in_8_bits_are_half_the_bytes() -> None:
    pytest.importorskip("triton")
    whole, rounded = (traffic("qwen3.5-27b", dtype=dtype) for dtype in ("bfloat16", "int8"))
    assert rounded.states == whole.states
    assert rounded.kv_per_token == whole.kv_per_token
    for part in ("dense", "head_dense", "draft_output"):
        assert getattr(rounded, part) == pytest.approx(getattr(whole, part) / 2, rel=0.002), part
    sparse = traffic("qwen3.5-35b-a3b", dtype="int8")  # where a row's scale is for 512 columns
    assert sparse.experts == pytest.approx(traffic("qwen3.5-35b-a3b").experts / 2, rel=0.004)


def test_matrices_in_4_bits_are_fewer_but_for_the_vocabulary() -> None:
    pytest.importorskip("triton")
    whole, rounded = (traffic("qwen3.5-27b", dtype=dtype) for dtype in ("bfloat16", "int4"))
    output = 248320 * 5120 * 2
    assert rounded.dense == pytest.approx((whole.dense - output) * 4.5 / 16 + output / 2, rel=0.002)
    assert rounded.head_dense == pytest.approx(whole.head_dense * 4.5 / 16, rel=0.002)
    assert rounded.draft_output == pytest.approx(whole.draft_output / 2, rel=0.002)


def test_a_tied_table_is_read_as_the_output() -> None:
    tied = open_random("qwen3.5-4b")
    head = sum(tied.checkpoint.num_bytes(name) for name in tied.checkpoint.names() if name.startswith("mtp."))
    states = 2 * 24 * 32 * 128 * 128 * 4
    assert step_bytes(traffic("qwen3.5-4b"), 1, 0, 0) == tied.num_bytes - head + states


def test_a_token_touches_its_own_experts_only() -> None:
    sparse = traffic("qwen3.5-35b-a3b")
    assert sparse.experts > 60e9
    assert step_bytes(sparse, 1, 0, 0) < sparse.dense + sparse.experts / 30
    four, one = step_bytes(sparse, 1, 3, 0), step_bytes(sparse, 1, 0, 0)
    assert four - one > 2.5 * sparse.experts * 8 / 256


# ---- load ----


def test_load(bench: Bench) -> None:
    report = bench(
        "load", "--rate", "50,200", "--requests", "5", "--modes", "off,2", "--prompt", "4-9", "--new", "3-6",
        "--max-streams", "4", "--seconds", "30",
    )  # fmt: skip
    assert [(row["rate"], row["mode"]) for row in report["results"]] == [
        (50, "off"),
        (50, "2"),
        (200, "off"),
        (200, "2"),
    ]
    for row in report["results"]:
        assert row["sent"] == row["finished"] == 5
        for kind in ("first_token_ms", "between_steps_ms", "per_token_ms"):
            assert 0 < row[kind]["p50"] <= row[kind]["p90"] <= row[kind]["p99"]
    assert bool(report["results"][1]["accepted_per_position"])


def test_what_does_not_end_in_time_is_counted(bench: Bench) -> None:
    report = bench("load", "--rate", "100", "--requests", "3", "--modes", "off", "--new", "1500", "--seconds", "0.05")
    [row] = report["results"]
    assert row["finished"] < max(1, row["sent"])
    assert row["wall_s"] < 30


def test_arrivals_are_poisson_bounded_and_the_same_for_every_mode() -> None:
    settings = LoadSettings([100.0], ["off"], requests=2000, seconds=1e6, prompt=(2, 5), new=(7, 7))
    arrivals = schedule(settings, 100.0, 50)
    assert arrivals == schedule(settings, 100.0, 50)
    assert len(arrivals) == 2000
    assert arrivals[-1].at == pytest.approx(20.0, rel=0.1)
    assert {len(arrival.prompt) for arrival in arrivals} == {2, 3, 4, 5}
    assert {arrival.num_new for arrival in arrivals} == {7}
    few = schedule(LoadSettings([100.0], ["off"], requests=2000, seconds=1.0), 100.0, 50)
    assert 60 < len(few) < 140


def test_percentiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0


# ---- prefill ----


def test_prefill(bench: Bench) -> None:
    report = bench(
        "prefill", "--lengths", "40,300", "--streams", "2", "--quiet-steps", "5", "--modes", "off,2", "--repeats", "1",
        "--max-step-tokens", "64",
    )  # fmt: skip
    assert [row["length"] for row in report["results"]] == [40, 300]
    for row in report["results"]:
        assert row["tok_s"] == pytest.approx(row["length"] / row["with_head_s"], rel=0.01)
        assert row["head_cost"] == pytest.approx(row["with_head_s"] / row["without_head_s"] - 1, abs=0.01)
    for each in report["disturbed"]:
        assert each["length"] == 300
        assert each["num_ended_early"] == 0
        assert each["p99_ratio"] == pytest.approx(each["disturbed_ms"]["p99"] / each["quiet_ms"]["p99"], rel=0.01)
    assert report["step_tokens"] == 64


# ---- start ----


def test_start(bench: Bench) -> None:
    report = bench("start", "--repeats", "1", "--draft", "off", "--max-context", "64")
    [seconds] = report["seconds"]
    assert 0.1 < seconds < 600


def test_a_process_that_gives_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--shape", "tiny", "--random-weights", "--device", "cpu"]
    assert main(["bench", "start", *tiny, "--kv-memory", "1"]) == 1
    assert "left for KV" in capsys.readouterr().err


def test_options_become_the_arguments_they_came_from() -> None:
    options = ModelOptions(
        shape="tiny", random_weights=True, draft=2, max_depth=3, simulate_acceptance=(0.5, 0.25), kv_memory=10**6
    )
    report = options.arguments()
    assert report[report.index("--simulate-acceptance") + 1] == "0.5,0.25"
    assert "--random-weights" in report
    assert "--max-streams" not in report
    assert ModelOptions("folder").arguments() == ["folder"]
    assert ModelOptions(prefix_cache="off").arguments() == ["--prefix-cache", "off"]
    assert ModelOptions().engine_config.prefix_cache
    assert not ModelOptions(prefix_cache="off").engine_config.prefix_cache


# ---- plan ----


def test_a_plan_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--shape", "qwen3.5-27b", "--device", "cuda", "--memory", "149G", "--max-streams", "64"]
    assert main(["plan", "--json", *asked, "--max-context", "4096"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["streams_of"]["4096"] == 64
    assert report["weights"] == pytest.approx(53.8e9, rel=0.01)
    assert 80e9 < report["total"] < 149e9
    assert main(["plan", "--shape", "qwen3.5-27b", "--device", "cuda", "--memory", "40G"]) == 1
    assert "take 55.10 GB, but 39.58 GB are free" in capsys.readouterr().err


# ---- plot ----


@pytest.mark.parametrize(("value", "top"), [(4.9, 5.0), (5.1, 10.0), (3756, 5000.0), (0.03, 0.05), (10, 10.0)])
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert nice_top(value) == pytest.approx(top)


def test_a_chart_with_one_point_and_odd_names() -> None:
    svg = Chart('a "b" & <c>', "", "x", "y", [Series("<off>", [(1, 0.0)])]).svg()
    assert "&lt;off&gt;" in svg
    assert "&amp;" in svg
