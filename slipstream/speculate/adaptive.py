"""The adaptive depth: the drafts with which a step is expected to make most tokens a second (search.py).

Depth 0 is a legal answer, so drafting never loses by more than its probes, which are held to a share of the time. Next
to rows whose requests want no drafts, drafting takes only the share of the time that the tuning allows, and the drafts
with the highest gain in that time are made.

Where the runner reports confidences, a row has thresholds too: a draft is verified only if its chance is at least
(seconds a draft adds) x (tokens a second the step makes anyway). Knows neither sequences nor blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.contract import NO_DRAFTS, DraftRequest
from slipstream.sampling.params import DraftSetting
from slipstream.speculate.acceptance import Acceptance
from slipstream.speculate.confidence import ConfidenceCalibration, Thresholds
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy, Load, SamplingRow, ahead
from slipstream.speculate.search import Candidate, Choice, Costs, Offset, by_chance, search
from slipstream.speculate.tuning import TUNING, Tuning

PROBING = " (this step tries another depth)"  # at the end of a reason
PLAIN_IS_FASTER = "a plain step was faster"
NO_THRESHOLDS = Thresholds(0.0, 0.0)


class Adaptive(DepthPolicy):
    def __init__(self, max_depth: int, costs: CostModel, stops_early: bool = False, tuning: Tuning = TUNING) -> None:
        self._max_depth = max_depth
        self._stops_early = stops_early
        self._tuning = tuning.depth
        self.costs = costs
        self._verify, self._draft = costs.verify.curve, costs.draft.curve
        self._acceptance = Acceptance(max_depth, tuning.acceptance)
        self._calibration = ConfidenceCalibration(max_depth, tuning.confidence)
        self._gain = 1.0  # of the last choice over no drafts, as a factor
        self._drafts_per_row = 1.0  # verified, by the last choice
        self._reason = f"drafting as far ahead as pays off, at most {max_depth} token{'' if max_depth == 1 else 's'}"
        self._why_plain = PLAIN_IS_FASTER
        self._num_steps = 0  # since the last probe
        self._seconds = 0.0  # since the last probe
        self._num_probes = 0
        self._probed, self._turn = "", 0  # of the rows that do not draft, the one that is probed
        self._num_idle = 0  # steps for which the last choice, no drafts, still stands
        self._idle_rows = 0  # with so many rows
        self._saved = 0.0  # seconds that drafting may add now next to rows that want no drafts

    @property
    def reason(self) -> str:
        return self._reason

    def why_plain(self, setting: DraftSetting | None) -> str:
        return self._why_plain

    def observe_row(self, key: str, num_drafted: int, num_accepted: int, confidences: Sequence[float] = ()) -> None:
        if confidences:
            self._calibration.observe_verdict(key, confidences, num_accepted)
        else:
            self._acceptance.observe(key, num_drafted, num_accepted)

    def observe_proposal(self, confidences: Sequence[float]) -> None:
        self._calibration.observe_proposal(confidences)

    def forget(self, key: str) -> None:
        self._acceptance.forget(key)
        self._calibration.forget(key)

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        if not rows:
            return []
        if not self._verify.known or not self._draft.known:
            return self._untimed(rows)
        self._num_steps += 1
        self._why_plain = PLAIN_IS_FASTER
        num_sampling = len(rows) + load.num_plain
        if self._is_idle(num_sampling, load):
            self._seconds += self._verify.at(num_sampling) + self.costs.fixed(num_sampling, load.context)
            self._reason = self._reason.removesuffix(PROBING)
            return [NO_DRAFTS] * len(rows)
        thresholds, choice = self._choose(rows, load)
        self._num_idle, self._idle_rows = 0 if any(choice.depths) else self._tuning.idle_steps, num_sampling
        self._reason = _explain(choice, thresholds if self._calibration.known else [], load.num_plain)
        if load.num_plain and not self._can_afford(choice):
            self._seconds += choice.plain_seconds
            self._why_plain = "streams that want no drafts kept their pace"
            return [NO_DRAFTS] * len(rows)
        self._seconds += choice.seconds
        requests = [_request(depth, *each) for depth, each in zip(choice.depths, thresholds)]
        return self._probe(rows, load, choice, requests) if self._num_steps >= self._tuning.probe_steps else requests

    def _is_idle(self, num_rows: int, load: Load) -> bool:
        """Whether nothing has changed since drafting was found not to pay: a choice takes time, too."""
        changed = num_rows != self._idle_rows or load.num_other_tokens
        if not self._num_idle or changed or self._num_steps >= self._tuning.probe_steps:
            return False
        self._num_idle -= 1
        return True

    def _can_afford(self, choice: Choice) -> bool:
        """Next to rows that want no drafts: every step saves some time, and drafts are made once it is enough."""
        added = choice.seconds - choice.plain_seconds
        self._saved = min(self._saved, added) + self._tuning.plain_share * choice.plain_seconds
        if self._saved < added:
            return False
        self._saved -= added
        return True

    def _untimed(self, rows: Sequence[SamplingRow]) -> list[DraftRequest]:
        depth = min(self._tuning.untimed_depth, self._max_depth)
        self._reason = f"drafting {ahead(depth)} until steps have been timed"
        return [DraftRequest(min(depth, row.max_depth), report_confidence=True) for row in rows]

    def _thresholds(self, rows: Sequence[SamplingRow], load: Load) -> list[Thresholds]:
        """[rows]: from the price of a draft in tokens, to verify it and to make it."""
        if not self._calibration.known:
            return [NO_THRESHOLDS] * len(rows)
        num_sampling = len(rows) + load.num_plain
        num_drafts = max(len(rows), round(self._drafts_per_row * len(rows)))
        verify = self._verify.span(num_sampling + load.num_other_tokens, num_drafts + 1)
        rate = (
            self._gain * num_sampling / (self._verify.at(num_sampling) + self.costs.fixed(num_sampling, load.context))
        )
        attending = self.costs.attending(_mean_context(rows))
        verifying = rate * ((verify[-1] - verify[0]) / num_drafts + attending)
        drafting = rate * self.costs.drafting([len(rows)], _mean_context(rows)) / len(rows)
        return [self._row_thresholds(row.key, verifying, drafting) for row in rows]

    def _row_thresholds(self, key: str, verifying: float, drafting: float) -> Thresholds:
        """From both prices. The next draft is assumed to be accepted as often as a first one."""
        draft = self._calibration.threshold(key, verifying)
        if draft is None or not self._stops_early:
            return Thresholds(draft, draft)
        go_on = self._calibration.threshold(key, (verifying + drafting) / self._calibration.first_draft_acceptance())
        return Thresholds(draft, go_on if go_on is None else max(draft, go_on))

    def _choose(self, rows: Sequence[SamplingRow], load: Load) -> tuple[list[Thresholds], Choice]:
        """Where all rows take part in every pass, thresholds save verification only, whose cost may be flat over many
        tokens: then all drafts may be the better choice."""
        thresholds = self._thresholds(rows, load)
        choice = self._best(rows, thresholds, load)
        if not self._stops_early and any(each.draft != 0.0 for each in thresholds):
            without = [NO_THRESHOLDS] * len(rows)
            other = self._best(rows, without, load)
            if other.rate > choice.rate:
                thresholds, choice = without, other
        self._gain = choice.rate * choice.plain_seconds / (len(rows) + load.num_plain)
        self._drafts_per_row = choice.drafts / len(rows)
        return thresholds, choice

    def _best(self, rows: Sequence[SamplingRow], thresholds: Sequence[Thresholds], load: Load) -> Choice:
        """Next to rows with a fixed depth drafts have their price there, but time is worth the tokens that the rows
        alone would make in it. Prompts do not count: the pieces that are read give way to drafts."""
        num_sampling = len(rows) + load.num_plain
        candidates = self._candidates(rows, thresholds)[: load.room]
        verify = self._verify.span(num_sampling + load.num_other_tokens, len(candidates) + 1)
        fixed = self.costs.fixed(num_sampling, load.context) + self._verify.at(num_sampling) - verify[0]
        context = _mean_context(rows)
        attending, drafting = self.costs.attending(context), self.costs.draft.of_context(context)
        draft = [seconds + count * drafting for count, seconds in enumerate(self._draft.span(1, len(rows)), 1)]
        costs = Costs([seconds + fixed + count * attending for count, seconds in enumerate(verify)], [0.0, *draft])
        plain_seconds, min_gain = costs.verify[0], self._tuning.min_gain
        plain = Choice([0] * len(rows), float(num_sampling), 0.0, plain_seconds, plain_seconds)
        best = search(candidates, costs, plain, min_gain)
        if load.num_plain and best.seconds > (1.0 + self._tuning.plain_share) * plain.seconds:
            # Not in every step, then: the highest gain in each second that is taken from the others.
            best = search(candidates, costs, plain, min_gain, Offset(plain.tokens, plain.seconds))
        return best

    def _candidates(self, rows: Sequence[SamplingRow], thresholds: Sequence[Thresholds]) -> list[Candidate]:
        by_depth: list[list[Candidate]] = [[] for _ in range(self._max_depth)]
        if self._calibration.known:
            self._add_by_confidence(by_depth, rows, thresholds)
        else:
            self._add_by_position(by_depth, rows)
        return by_chance(by_depth)

    def _add_by_position(self, by_depth: list[list[Candidate]], rows: Sequence[SamplingRow]) -> None:
        """Only the acceptance at each position is known: every requested draft is proposed."""
        prior_hits = self._acceptance.prior_hits()
        for index, row in enumerate(rows):
            survival = self._acceptance.survival(row.key, row.max_depth, prior_hits)
            for depth, chance in enumerate(survival, 1):
                by_depth[depth - 1].append(Candidate(chance, depth, index, 1.0, 1.0))

    def _add_by_confidence(
        self, by_depth: list[list[Candidate]], rows: Sequence[SamplingRow], thresholds: Sequence[Thresholds]
    ) -> None:
        """The runner will measure each draft's confidence, and the thresholds will keep the unlikely ones out."""
        for index, (row, limits) in enumerate(zip(rows, thresholds)):
            chance = 1.0
            outlook = self._calibration.outlook(row.key, row.max_depth, limits)
            for depth, (made, kept, accepted) in enumerate(outlook, 1):
                chance = min(chance, accepted)  # positions were seen at different times
                in_pass = made if self._stops_early else 1.0
                by_depth[depth - 1].append(Candidate(chance, depth, index, kept, in_pass))

    def _probe(
        self, rows: Sequence[SamplingRow], load: Load, choice: Choice, requests: list[DraftRequest]
    ) -> list[DraftRequest]:
        """Beyond the choice: as many rows as the allowance pays for, one draft deeper, or once without drafts."""
        probe = self._probe_plain(choice) or self._probe_deeper(rows, load, choice, requests)
        if probe is None:
            return requests
        self._num_steps, self._seconds = 0, 0.0
        self._num_probes += 1
        self._reason += PROBING
        return probe

    def _probe_plain(self, choice: Choice) -> list[DraftRequest] | None:
        due = self._num_probes % self._tuning.plain_probes == 0
        if not due or not any(choice.depths):
            return None
        self._why_plain = "a plain step was timed for comparison"
        return [NO_DRAFTS] * len(choice.depths)

    def _probe_deeper(
        self, rows: Sequence[SamplingRow], load: Load, choice: Choice, requests: list[DraftRequest]
    ) -> list[DraftRequest] | None:
        """One draft deeper, and without thresholds: the drafts that they hide are not known otherwise."""
        hidden = [
            i
            for i, (row, request) in enumerate(zip(rows, requests))
            if request.depth < row.max_depth or request.threshold > 0.0
        ]
        hidden = self._in_turn(rows, requests, hidden)[: max(0, load.room - sum(choice.depths))]
        while hidden:
            depths = list(choice.depths)
            for index in hidden:
                depths[index] = min(depths[index] + 1, rows[index].max_depth)
            if self._seconds_of(rows, depths, load) - choice.seconds <= self._tuning.probe_share * self._seconds:
                return [
                    DraftRequest(depth, report_confidence=True) if index in hidden else request
                    for index, (depth, request) in enumerate(zip(depths, requests))
                ]
            hidden = hidden[: len(hidden) // 2]
        return None

    def _in_turn(self, rows: Sequence[SamplingRow], requests: list[DraftRequest], hidden: list[int]) -> list[int]:
        """Rows for a probe, the first one to be preferred. Of those that do not draft only one, and for many probes the
        same: a head that did not see a row's tokens must be fed all of them first."""
        idle = [i for i in hidden if not requests[i].depth]
        if idle:
            turn = self._num_probes // self._tuning.probes_of_a_row
            same = [i for i in idle if rows[i].key == self._probed and turn == self._turn]
            one = same[0] if same else idle[turn % len(idle)]
            self._probed, self._turn = rows[one].key, turn
            hidden = [i for i in hidden if requests[i].depth or i == one]
        start = self._num_probes % max(1, len(hidden))
        return hidden[start:] + hidden[:start]

    def _seconds_of(self, rows: Sequence[SamplingRow], depths: list[int], load: Load) -> float:
        passes = [sum(depth > i for depth in depths) for i in range(max(depths))]
        num_sampling = len(depths) + load.num_plain
        num_tokens = num_sampling + load.num_other_tokens + sum(depths)
        context = _mean_context(rows)
        drafting = self.costs.drafting(passes, context) + sum(depths) * self.costs.attending(context)
        return self.costs.fixed(num_sampling, load.context) + self._verify.at(num_tokens) + drafting


def _mean_context(rows: Sequence[SamplingRow]) -> float:
    return sum(row.context for row in rows) / len(rows)


def _request(depth: int, draft: float | None, go_on: float | None) -> DraftRequest:
    if not depth or draft is None:
        return NO_DRAFTS
    if go_on is None:
        return DraftRequest(1, draft, report_confidence=True)
    return DraftRequest(depth, draft, go_on, report_confidence=True)


def _explain(choice: Choice, thresholds: Sequence[Thresholds], num_plain: int) -> str:
    """``thresholds``: none where the runner reports no confidences."""
    low, high = min(choice.depths), max(choice.depths)
    num_rows, plain = len(choice.depths) + num_plain, _ms(choice.plain_seconds)
    pace = f"; {num_plain} that want no drafts keep their pace" if num_plain else ""
    if high == 0:
        streams = f" of {num_rows} streams" if num_rows > 1 else ""
        return f"not drafting now: a plain step{streams} ({plain}) is faster than any draft{pace}"
    sure = ""
    if thresholds:
        lowest = min(limits.draft or 0.0 for depth, limits in zip(choice.depths, thresholds) if depth)
        percent = round(100 * lowest)
        sure = f" while at least {percent} % sure" if percent else ""
    expected = f"about {choice.tokens:.1f} tokens in {_ms(choice.seconds)}"
    return f"drafting {ahead(low, high)}{sure}: {expected} instead of {num_rows} in {plain}{pace}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
