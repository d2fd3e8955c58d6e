"""The adaptive depth: drafts compete by their chance of being accepted, and the best prefix by rate wins.

Rate = tokens expected of the step over the seconds it is expected to take. Depth 0 is a legal answer, so drafting
never loses by more than its probes, which are held to a share of the time. Knows neither sequences nor blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.acceptance import Acceptance
from slipstream.engine.costs import CostCurve
from slipstream.engine.depth import DepthPolicy, DrawRow, Load, StepTiming
from slipstream.engine.plan import StepCosts
from slipstream.sampling.params import MAX_DEPTH

BLIND_DEPTH = 2  # while nothing was timed yet
PROBE_STEPS = 64  # steps between two probes
PROBE_SHARE = 0.005  # of the time since the last probe, what the next one may cost
MARGIN = 1.01  # drafting must promise this much: less than the estimates' own error is no gain
OTHER_RATE = 0.05  # how fast the estimate of the time outside the runner follows
PLAIN_PROBES = 4  # every so many probes, one without drafts: what a small step costs must not be hearsay

Slot = tuple[float, int, int]  # (-S, depth, row): one draft that may be made


@dataclass(frozen=True, slots=True)
class Choice:
    depths: list[int]
    tokens: float  # expected
    seconds: float  # expected
    plain_seconds: float  # of the same step without drafts

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Adaptive(DepthPolicy):
    def __init__(self, max_depth: int, costs: StepCosts) -> None:
        self._max_depth = max_depth
        self._verify = CostCurve(costs.verify)
        self._draft = CostCurve(costs.draft)
        self._other = 0.0  # seconds a step takes outside the runner, whatever its depth
        self._acceptance = Acceptance(max_depth)
        self._reason = "adaptive: no step yet"
        self._num_steps = 0  # since the last probe
        self._seconds = 0.0  # since the last probe
        self._num_probes = 0

    @property
    def reason(self) -> str:
        return self._reason

    def observe_row(self, key: str, num_drafted: int, num_accepted: int) -> None:
        self._acceptance.observe(key, num_drafted, num_accepted)

    def observe_step(self, timing: StepTiming) -> None:
        self._verify.observe(timing.num_tokens, timing.verify_seconds)
        # An engine that was idle for a while says nothing: no step has that much beside it.
        other = min(timing.other_seconds, timing.verify_seconds)
        self._other += OTHER_RATE * (other - self._other)
        if not timing.pass_rows or timing.draft_seconds <= 0.0:
            return
        if not self._draft.known:
            self._draft.observe(timing.pass_rows[0], timing.draft_seconds / len(timing.pass_rows))
        expected = [self._draft.at(num_rows) for num_rows in timing.pass_rows]
        error = timing.draft_seconds / sum(expected)
        for num_rows, seconds in zip(timing.pass_rows, expected):
            self._draft.observe(num_rows, seconds * error)

    def forget(self, key: str) -> None:
        self._acceptance.forget(key)

    def decide(self, rows: Sequence[DrawRow], load: Load) -> list[int]:
        if not rows:
            return []
        if not self._verify.known or not self._draft.known:
            return self._blind(rows)
        choice = self._best(rows, load)
        self._num_steps += 1
        self._seconds += choice.seconds
        self._reason = _explain(choice)
        return self._probe(rows, load, choice) if self._num_steps >= PROBE_STEPS else choice.depths

    def _blind(self, rows: Sequence[DrawRow]) -> list[int]:
        self._reason = f"adaptive: depth {min(BLIND_DEPTH, self._max_depth)} until steps have been timed"
        return [min(BLIND_DEPTH, row.most) for row in rows]

    def _best(self, rows: Sequence[DrawRow], load: Load) -> Choice:
        """The best prefix under each cap: a pass has a price of its own, so the likely slots of the next may wait."""
        slots = self._slots(rows)[: load.room]
        start = len(rows) + load.num_other_tokens
        verify = [seconds + self._other for seconds in self._verify.span(start, len(slots) + 1)]
        draft = [0.0, *self._draft.span(1, len(rows))]
        best = plain = Choice([0] * len(rows), float(len(rows)), verify[0], verify[0])
        deepest = max((row.most for row in rows), default=0)
        for cap in range(1, deepest):
            best = _best_prefix([slot for slot in slots if slot[1] <= cap], verify, draft, best)
        best = _best_prefix(slots, verify, draft, best)
        return best if best.rate > MARGIN * plain.rate else plain

    def _slots(self, rows: Sequence[DrawRow]) -> list[Slot]:
        """The likeliest first; a row's own drafts stay in order because its S never rises."""
        lean = self._acceptance.lean()
        survival = self._acceptance.survival
        slots: list[Slot] = []
        for index, row in enumerate(rows):
            for depth, chance in enumerate(survival(row.key, row.most, lean), 1):
                slots.append((-chance, depth, index))
        slots.sort()
        return slots

    def _probe(self, rows: Sequence[DrawRow], load: Load, choice: Choice) -> list[int]:
        """Look past the choice: as many rows as the allowance pays for, one draft deeper, or once without drafts."""
        depths = self._probe_plain(choice) or self._probe_deeper(rows, load, choice)
        if depths is None:
            return choice.depths
        self._num_steps, self._seconds = 0, 0.0
        self._num_probes += 1
        self._reason += ", probing"
        return depths

    def _probe_plain(self, choice: Choice) -> list[int] | None:
        due = self._num_probes % PLAIN_PROBES == 0
        return [0] * len(choice.depths) if due and any(choice.depths) else None

    def _probe_deeper(self, rows: Sequence[DrawRow], load: Load, choice: Choice) -> list[int] | None:
        shallow = [index for index, row in enumerate(rows) if choice.depths[index] < row.most]
        start = self._num_probes % max(1, len(shallow))
        shallow = (shallow[start:] + shallow[:start])[: max(0, load.room - sum(choice.depths))]
        while shallow:
            depths = list(choice.depths)
            for index in shallow:
                depths[index] += 1
            if self._seconds_of(depths, load) - choice.seconds <= PROBE_SHARE * self._seconds:
                return depths
            shallow = shallow[: len(shallow) // 2]
        return None

    def _seconds_of(self, depths: list[int], load: Load) -> float:
        passes = [sum(depth > i for depth in depths) for i in range(max(depths))]
        num_tokens = len(depths) + load.num_other_tokens + sum(depths)
        return self._other + self._verify.at(num_tokens) + sum(self._draft.at(num_rows) for num_rows in passes)


def _best_prefix(slots: list[Slot], verify: list[float], draft: list[float], best: Choice) -> Choice:
    """Take slot after slot and keep the count at which the rate was highest, if it beats ``best``."""
    in_pass = [0] * (MAX_DEPTH + 1)
    count, rate = 0, best.rate
    tokens, passes = float(len(best.depths)), 0.0
    for index, (loss, depth, _) in enumerate(slots, 1):
        tokens -= loss
        num_rows = in_pass[depth] = in_pass[depth] + 1
        passes += draft[num_rows] - draft[num_rows - 1]
        seconds = verify[index] + passes
        if tokens > rate * seconds:
            count, rate, at_tokens, at_seconds = index, tokens / seconds, tokens, seconds
    if not count:
        return best
    depths = [0] * len(best.depths)
    for _, depth, row in slots[:count]:
        depths[row] = depth
    return Choice(depths, at_tokens, at_seconds, best.plain_seconds)


def _explain(choice: Choice) -> str:
    num_rows = len(choice.depths)
    low, high = min(choice.depths), max(choice.depths)
    depth = f"depth {low}" if low == high else f"depths {low} to {high}"
    plain = f"{num_rows} in {1000 * choice.plain_seconds:.1f} ms"
    if high == 0:
        return f"adaptive: {depth} — no draft beats {plain}"
    return f"adaptive: {depth} — {choice.tokens:.1f} tokens in {1000 * choice.seconds:.1f} ms beat {plain}"
