"""The adaptive depth: drafts compete by their chance of being accepted, and the best prefix by rate wins.

Rate = tokens expected of the step over the seconds it is expected to take. Depth 0 is a legal answer, so drafting
never loses by more than its probes, which are held to a share of the time. Beside rows whose requests want no drafts,
drafting takes only the time that ``PLAIN_SHARE`` allows, and those drafts are made that gain most in it.

Where the runner tells how confident its head is, a row is asked for drafts only as long as they are likely enough to be
worth their time: a chance of (seconds a draft adds) x (tokens a second the step makes anyway). Knows neither sequences
nor blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.contract import NO_DRAFTS, DraftRequest, StepCosts
from slipstream.sampling.params import MAX_DEPTH
from slipstream.speculate.acceptance import Acceptance
from slipstream.speculate.confidence import Chains
from slipstream.speculate.cost_curve import CostCurve
from slipstream.speculate.policy import DepthPolicy, Load, SamplingRow, StepTiming

BLIND_DEPTH = 2  # while nothing was timed yet
PROBE_STEPS = 64  # steps between two probes
PROBE_SHARE = 0.005  # of the time since the last probe, what the next one may cost
MARGIN = 1.01  # drafting must promise this much: less than the estimates' own error is no gain
PLAIN_SHARE = 0.03  # of the steps' time, what drafting may add to it beside rows that want none: they keep their pace
PROBING = ", probing"  # at the end of a reason
OTHER_RATE = 0.05  # how fast the estimate of the time outside the runner follows
IDLE_STEPS = 8  # that go by without a draft before the choice is looked at again
PLAIN_PROBES = 4  # every so many probes, one without drafts: what a small step costs must not be hearsay

# One draft that may be made: (-chance that it is proposed and accepted with all before it, depth, row, chance that it
# is proposed, chance that its row takes part in its pass)
Slot = tuple[float, int, int, float, float]
Bound = tuple[float | None, float | None]  # draft and continue threshold; None: no chain is confident enough


@dataclass(frozen=True, slots=True)
class Choice:
    depths: list[int]
    tokens: float  # expected
    drafts: float  # expected to be verified
    seconds: float  # expected
    plain_seconds: float  # of the same step without drafts

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def rate_beyond(self, tokens: float, seconds: float) -> float:
        """Tokens a second, leaving out so many of both."""
        return (self.tokens - tokens) / max(self.seconds - seconds, 1e-9)


class Adaptive(DepthPolicy):
    def __init__(self, max_depth: int, costs: StepCosts, stops_early: bool = False) -> None:
        self._max_depth = max_depth
        self._stops_early = stops_early
        self._verify = CostCurve(costs.verify)
        self._draft = CostCurve(costs.draft)
        self._per_row = costs.per_row
        self._other = 0.0  # seconds a step takes outside the runner, whatever its depth
        self._acceptance = Acceptance(max_depth)
        self._chains = Chains(max_depth)
        self._gain = 1.0  # of the last choice over no drafts, as a factor
        self._share = 1.0  # drafts verified for each row in the last choice
        self._reason = "adaptive: no step yet"
        self._num_steps = 0  # since the last probe
        self._seconds = 0.0  # since the last probe
        self._num_probes = 0
        self._idle = 0  # steps for which the last choice, no drafts, still stands
        self._idle_rows = 0  # with so many rows
        self._allowed = 0.0  # seconds that drafting may add now beside rows that want none

    @property
    def reason(self) -> str:
        return self._reason

    def observe_row(self, key: str, num_drafted: int, num_accepted: int, confidences: Sequence[float] = ()) -> None:
        if confidences:
            self._chains.observe_verdict(key, confidences, num_accepted)
        else:
            self._acceptance.observe(key, num_drafted, num_accepted)

    def observe_proposal(self, confidences: Sequence[float]) -> None:
        self._chains.observe_proposal(confidences)

    def observe_step(self, timing: StepTiming) -> None:
        rows = min(self._per_row * timing.num_rows, timing.verify_seconds / 2)
        self._verify.observe(timing.num_tokens, timing.verify_seconds - rows)
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
        self._chains.forget(key)

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        if not rows:
            return []
        if not self._verify.known or not self._draft.known:
            return self._blind(rows)
        self._num_steps += 1
        num_drawing = len(rows) + load.num_plain
        if self._rests(num_drawing, load):
            self._seconds += self._verify.at(num_drawing)
            self._reason = self._reason.removesuffix(PROBING)
            return [NO_DRAFTS] * len(rows)
        bounds = self._bounds(rows, load)
        choice = self._best(rows, bounds, load)
        self._idle, self._idle_rows = 0 if any(choice.depths) else IDLE_STEPS, num_drawing
        self._reason = _explain(choice, bounds if self._chains.known else [], load.num_plain)
        if load.num_plain and not self._afford(choice):
            self._seconds += choice.plain_seconds
            return [NO_DRAFTS] * len(rows)
        self._seconds += choice.seconds
        asks = [_request(depth, *bound) for depth, bound in zip(choice.depths, bounds)]
        return self._probe(rows, load, choice, asks) if self._num_steps >= PROBE_STEPS else asks

    def _rests(self, num_rows: int, load: Load) -> bool:
        """Whether nothing has changed since drafting was found not to pay: looking takes time, too."""
        if not self._idle or num_rows != self._idle_rows or load.num_other_tokens or self._num_steps >= PROBE_STEPS:
            return False
        self._idle -= 1
        return True

    def _afford(self, choice: Choice) -> bool:
        """Beside rows that want no drafts: time is put by in every step, and drafts are made once there is enough."""
        added = choice.seconds - choice.plain_seconds
        self._allowed = min(self._allowed, added) + PLAIN_SHARE * choice.plain_seconds
        if self._allowed < added:
            return False
        self._allowed -= added
        return True

    def _blind(self, rows: Sequence[SamplingRow]) -> list[DraftRequest]:
        self._reason = f"adaptive: depth {min(BLIND_DEPTH, self._max_depth)} until steps have been timed"
        return [DraftRequest(min(BLIND_DEPTH, row.max_depth), report_confidence=True) for row in rows]

    def _bounds(self, rows: Sequence[SamplingRow], load: Load) -> list[Bound]:
        """[rows]: how sure the head must be of a chain for its last draft to be verified, and for another to follow."""
        if not self._chains.known:
            return [(0.0, 0.0)] * len(rows)
        num_drawing = len(rows) + load.num_plain
        num_drafts = max(1, round(self._share * len(rows)))
        plain, *_, full = self._verify.span(num_drawing + load.num_other_tokens, num_drafts + 1)
        rate = self._gain * num_drawing / (self._verify.at(num_drawing) + self._beside(num_drawing))
        verifying = rate * (full - plain) / num_drafts
        drafting = rate * self._draft.at(len(rows)) / len(rows)
        return [self._bound(row.key, verifying, drafting) for row in rows]

    def _bound(self, key: str, verifying: float, drafting: float) -> Bound:
        """From what both cost in tokens. The next draft is taken to be accepted as often as a first one is."""
        keep = self._chains.threshold(key, verifying)
        if keep is None or not self._stops_early:
            return keep, keep
        go_on = self._chains.threshold(key, (verifying + drafting) / self._chains.first())
        return keep, go_on if go_on is None else max(keep, go_on)

    def _best(self, rows: Sequence[SamplingRow], bounds: Sequence[Bound], load: Load) -> Choice:
        """The time that prompts take is spent in any case: beside them drafts cost what they cost there, but time is
        worth what the rows alone make of it.
        """
        num_drawing = len(rows) + load.num_plain
        slots = self._slots(rows, bounds)[: load.room]
        costs = self._verify.span(num_drawing + load.num_other_tokens, len(slots) + 1)
        beside = self._beside(num_drawing) + self._verify.at(num_drawing) - costs[0]
        verify = [seconds + beside for seconds in costs]
        draft = [0.0, *self._draft.span(1, len(rows))]
        plain = Choice([0] * len(rows), float(num_drawing), 0.0, verify[0], verify[0])
        best = _search(slots, verify, draft, plain, (0.0, 0.0))
        if load.num_plain and best.seconds > (1.0 + PLAIN_SHARE) * plain.seconds:
            # Not in every step, then: what gains most in each second that it takes from the others.
            best = _search(slots, verify, draft, plain, (plain.tokens, plain.seconds))
        self._gain, self._share = best.rate / plain.rate, best.drafts / len(rows)
        return best

    def _slots(self, rows: Sequence[SamplingRow], bounds: Sequence[Bound]) -> list[Slot]:
        """The likeliest first; a row's own drafts stay in order because their chances never rise."""
        slots = self._sure_slots(rows, bounds) if self._chains.known else self._blank_slots(rows)
        slots.sort()
        return slots

    def _blank_slots(self, rows: Sequence[SamplingRow]) -> list[Slot]:
        """Nothing is known of a draft but how its position has fared: every one asked for is proposed."""
        lean = self._acceptance.lean()
        slots: list[Slot] = []
        for index, row in enumerate(rows):
            for depth, chance in enumerate(self._acceptance.survival(row.key, row.max_depth, lean), 1):
                slots.append((-chance, depth, index, 1.0, 1.0))
        return slots

    def _sure_slots(self, rows: Sequence[SamplingRow], bounds: Sequence[Bound]) -> list[Slot]:
        """The head will tell how sure it is, and the bounds will keep the unlikely ones out."""
        slots: list[Slot] = []
        for index, (row, bound) in enumerate(zip(rows, bounds)):
            likeliest = 1.0
            for depth, (made, kept, accepted) in enumerate(self._chains.outlook(row.key, row.max_depth, *bound), 1):
                likeliest = min(likeliest, accepted)  # positions were seen at different times
                slots.append((-likeliest, depth, index, kept, made if self._stops_early else 1.0))
        return slots

    def _probe(
        self, rows: Sequence[SamplingRow], load: Load, choice: Choice, asks: list[DraftRequest]
    ) -> list[DraftRequest]:
        """Look past the choice: as many rows as the allowance pays for, one draft deeper, or once without drafts."""
        probe = self._probe_plain(choice) or self._probe_deeper(rows, load, choice, asks)
        if probe is None:
            return asks
        self._num_steps, self._seconds = 0, 0.0
        self._num_probes += 1
        self._reason += PROBING
        return probe

    def _probe_plain(self, choice: Choice) -> list[DraftRequest] | None:
        due = self._num_probes % PLAIN_PROBES == 0
        return [NO_DRAFTS] * len(choice.depths) if due and any(choice.depths) else None

    def _probe_deeper(
        self, rows: Sequence[SamplingRow], load: Load, choice: Choice, asks: list[DraftRequest]
    ) -> list[DraftRequest] | None:
        """One draft deeper, and without a floor: what it hides is not known otherwise."""
        hidden = [i for i, (row, ask) in enumerate(zip(rows, asks)) if ask.depth < row.max_depth or ask.threshold > 0.0]
        start = self._num_probes % max(1, len(hidden))
        hidden = (hidden[start:] + hidden[:start])[: max(0, load.room - sum(choice.depths))]
        while hidden:
            depths = list(choice.depths)
            for index in hidden:
                depths[index] = min(depths[index] + 1, rows[index].max_depth)
            if self._seconds_of(depths, load) - choice.seconds <= PROBE_SHARE * self._seconds:
                return [
                    DraftRequest(depth, report_confidence=True) if index in hidden else ask
                    for index, (depth, ask) in enumerate(zip(depths, asks))
                ]
            hidden = hidden[: len(hidden) // 2]
        return None

    def _seconds_of(self, depths: list[int], load: Load) -> float:
        passes = [sum(depth > i for depth in depths) for i in range(max(depths))]
        num_drawing = len(depths) + load.num_plain
        num_tokens = num_drawing + load.num_other_tokens + sum(depths)
        drafting = sum(self._draft.at(num_rows) for num_rows in passes)
        return self._beside(num_drawing) + self._verify.at(num_tokens) + drafting

    def _beside(self, num_rows: int) -> float:
        """Seconds of a step that no depth changes."""
        return self._other + self._per_row * num_rows


def _search(
    slots: list[Slot], verify: list[float], draft: list[float], plain: Choice, given: tuple[float, float]
) -> Choice:
    """Most tokens a second, beyond those of both that are given; ``plain`` if no drafts do better than it does.

    The best prefix under each cap: a pass has a price of its own, so the likely slots of the next may wait.
    """
    best, least = plain, MARGIN * plain.rate
    for cap in range(1, max((slot[1] for slot in slots), default=0) + 1):
        found = _best_prefix([slot for slot in slots if slot[1] <= cap], verify, draft, plain, least, given)
        if found is not None:
            best, least = found, found.rate_beyond(*given)
    return best


def _best_prefix(
    slots: list[Slot], verify: list[float], draft: list[float], plain: Choice, least: float, given: tuple[float, float]
) -> Choice | None:
    """Take slot after slot: the count with most tokens a second beyond what is given, if it is more than ``least``."""
    in_pass = [0.0] * (MAX_DEPTH + 1)
    tokens, drafts, passes = plain.tokens, 0.0, 0.0
    best = None
    for index, (loss, depth, _, proposed, taking_part) in enumerate(slots, 1):
        tokens -= loss
        drafts += proposed
        passes -= _between(draft, in_pass[depth])
        in_pass[depth] += taking_part
        passes += _between(draft, in_pass[depth])
        seconds = _between(verify, drafts) + passes
        if tokens - given[0] > least * (seconds - given[1]):
            least = (tokens - given[0]) / max(seconds - given[1], 1e-9)
            best = index, (tokens, drafts, seconds)
    if best is None:
        return None
    count, at = best
    depths = [0] * len(plain.depths)
    for _, depth, row, _, _ in slots[:count]:
        depths[row] = depth
    return Choice(depths, *at, plain.seconds)


def _between(values: Sequence[float], x: float) -> float:
    """The value at x, which need not be whole, on straight lines through those at 0, 1, 2, ..."""
    left = int(x)
    if left + 1 >= len(values):
        return values[-1]
    return values[left] + (x - left) * (values[left + 1] - values[left])


def _request(depth: int, keep: float | None, go_on: float | None) -> DraftRequest:
    if not depth or keep is None:
        return NO_DRAFTS
    if go_on is None:
        return DraftRequest(1, keep, report_confidence=True)
    return DraftRequest(depth, keep, go_on, report_confidence=True)


def _explain(choice: Choice, bounds: Sequence[Bound], num_plain: int) -> str:
    """``bounds``: none where the runner tells no confidences."""
    low, high = min(choice.depths), max(choice.depths)
    depth = f"depth {low}" if low == high else f"depths {low} to {high}"
    if high and bounds:
        least = round(100 * min(keep or 0.0 for depth, (keep, _) in zip(choice.depths, bounds) if depth))
        depth += f" while {least} % sure" if least else ""
    plain = f"{len(choice.depths) + num_plain} in {1000 * choice.plain_seconds:.1f} ms"
    if num_plain:
        plain += f", and {num_plain} that want no drafts keep their pace"
    if high == 0:
        return f"adaptive: {depth} — no draft beats {plain}"
    return f"adaptive: {depth} — {choice.tokens:.1f} tokens in {1000 * choice.seconds:.1f} ms beat {plain}"
