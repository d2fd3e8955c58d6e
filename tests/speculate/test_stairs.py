"""The adaptive policy on a GPU: costs are stairs, and all rows take part in every draft pass."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest

from slipstream.engine.contract import DraftRequest, StepCosts
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.cost_model import CostModel, Decoding, StepTiming
from slipstream.speculate.policy import Load, SamplingRow

DEPTH = 3
# Milliseconds of verification by tokens, as of an H200 with a 27B model: flat from 17 to 32, from 33 to 64, ...
STAIRS = [(1, 12.7), (4, 13.0), (8, 13.5), (16, 13.9), (17, 15.0), (32, 15.0), (33, 16.0), (64, 16.0), (65, 17.2),
          (128, 17.8), (129, 20.5), (256, 21.5), (257, 33.0), (512, 34.0), (1024, 64.0)]  # fmt: skip
PER_ROW = 5e-5
HIGH, LOW = (0.85, 0.72 / 0.85, 0.60 / 0.72), (0.45, 0.2 / 0.45, 0.09 / 0.2)


def verify_seconds(num_tokens: int) -> float:
    right = max(1, bisect_left(STAIRS, (num_tokens, 0.0)))
    (x, y), (z, w) = STAIRS[right - 1], STAIRS[right]
    return (y + (w - y) * (num_tokens - x) / (z - x)) / 1e3


def pass_seconds(num_rows: int) -> float:
    return (0.27 + 0.001 * num_rows) / 1e3


class Gpu:
    """Rows whose drafts have these confidences, give or take ``spread``, and are right as often."""

    def __init__(self, num_rows: int, rates: tuple[float, ...], *, reports: bool, spread: float = 0.0) -> None:
        costs = StepCosts(
            tuple((n, verify_seconds(n)) for n, _ in STAIRS), tuple((n, pass_seconds(n)) for n in (1, 16, 256)), PER_ROW
        )
        self.policy = Adaptive(DEPTH, CostModel(costs))
        self._rates, self._reports, self._spread = rates, reports, spread
        self._rows = [SamplingRow(str(i), DEPTH) for i in range(num_rows)]
        self._held: list[tuple[float, ...]] = [()] * num_rows
        self._dice = random.Random(num_rows)

    def run(self, num_steps: int) -> float:
        """Tokens a second."""
        tokens = seconds = 0.0
        for _ in range(num_steps):
            requests = self.policy.decide(self._rows, Load(len(self._rows)))
            num_fed = len(self._rows) + sum(map(len, self._held))
            tokens += sum(1 + self._accept(row, held) for row, held in zip(self._rows, self._held, strict=True))
            self._held = [self._propose(request) for request in requests]
            passes = [sum(request.depth > i for request in requests) for i in range(DEPTH)]
            verify = (verify_seconds(num_fed) + PER_ROW * len(self._rows)) * self._dice.gauss(1.0, 0.005)
            draft = sum(pass_seconds(n) for n in passes if n)
            decoding = Decoding(num_fed, len(self._rows), pass_rows=tuple(filter(None, passes)))
            self.policy.costs.observe(StepTiming(decoding, verify, draft))
            seconds += verify + draft
        return tokens / seconds

    def _accept(self, row: SamplingRow, held: tuple[float, ...]) -> int:
        count = 0
        while count < len(held) and self._dice.random() < held[count]:
            count += 1
        self.policy.observe_row(row.key, len(held), count, held if self._reports else ())
        return count

    def _propose(self, request: DraftRequest) -> tuple[float, ...]:
        made: list[float] = []
        chain, num_kept = 1.0, 0
        for rate in self._rates[: request.depth]:
            made.append(min(0.99, max(0.02, rate + (self._dice.random() - 0.5) * self._spread)))
            chain *= made[-1]
            if self._reports and chain < request.threshold:
                break
            num_kept += 1
            if self._reports and chain < request.continue_threshold:
                break
        if made and self._reports:
            self.policy.observe_proposal(made)
        return tuple(made[:num_kept])


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize(("rates", "spread"), [(HIGH, 0.0), (LOW, 0.0), ((0.7, 0.65, 0.6), 0.8)])
def test_confidences_never_cost_speed(num_rows: int, rates: tuple[float, ...], spread: float) -> None:
    with_them, without = (Gpu(num_rows, rates, reports=reports, spread=spread) for reports in (True, False))
    assert with_them.run(300) >= 0.98 * without.run(300)


def test_confidences_pay_where_verification_is_dear() -> None:
    with_them, without = (Gpu(256, (0.7, 0.65, 0.6), reports=reports, spread=0.8) for reports in (True, False))
    assert with_them.run(300) >= 1.03 * without.run(300)


@pytest.mark.parametrize("num_rows", [16, 64])
def test_a_stair_right_after_the_rows_does_not_end_drafting_for_good(num_rows: int) -> None:
    """One draft costs a whole stair, and so does one for each row: a policy without drafts must see the second."""
    gpu = Gpu(num_rows, HIGH, reports=True)
    gpu.policy.observe_proposal(HIGH)
    gpu.policy._drafts_per_row, gpu.policy._gain = 0.0, 1.0
    gpu.run(100)
    assert gpu.run(100) >= 0.97 * Gpu(num_rows, HIGH, reports=False).run(200)
