"""The depth policy of each row: the engine's own, or the one its request requests for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.engine.contract import NO_DRAFTS, DraftRequest, RunnerInfo
from slipstream.sampling.params import MAX_DEPTH, DraftSetting
from slipstream.speculate.adaptive import Adaptive
from slipstream.speculate.cost_model import CostModel
from slipstream.speculate.policy import DepthPolicy, Fixed, Load, Off, SamplingRow, Solo


def make_policy(setting: DraftSetting, info: RunnerInfo, max_depth: int, costs: CostModel) -> DepthPolicy:
    if info.max_depth == 0:
        return Off(info.why_no_draft or "the model has no MTP head")
    if max_depth == 0:
        return Off("the largest depth allowed is 0")
    return PerRequest(setting, Adaptive(min(max_depth, info.max_depth), costs, info.stops_early))


class PerRequest(DepthPolicy):
    def __init__(self, setting: DraftSetting, adaptive: DepthPolicy) -> None:
        off = Off("the request turned drafting off")
        self._adaptive = adaptive
        self._by_setting: dict[DraftSetting, DepthPolicy] = {"off": off, "solo": Solo(adaptive), "adaptive": adaptive}
        self._by_setting |= {depth: Fixed(depth) if depth else off for depth in range(MAX_DEPTH + 1)}
        is_off = setting in ("off", 0)
        self._default = Off("the server's settings turn drafting off") if is_off else self._by_setting[setting]

    @property
    def reason(self) -> str:
        return self._default.reason

    def why_plain(self, setting: DraftSetting | None) -> str:
        return self._policy(setting).why_plain(setting)

    def may_draft(self, setting: DraftSetting | None) -> bool:
        return self._policy(setting).may_draft(setting)

    def decide(self, rows: Sequence[SamplingRow], load: Load) -> list[DraftRequest]:
        """The adaptive rows come last: for them the others' drafts are tokens that are in the step anyway."""
        policies = [self._policy(row.setting) for row in rows]
        requests = [NO_DRAFTS] * len(rows)
        num_plain = sum(isinstance(policy, Off) for policy in policies)
        for policy in sorted(set(policies), key=lambda policy: policy is self._adaptive):
            mine = [index for index, other in enumerate(policies) if other is policy]
            taken = sum(request.depth for request in requests)
            num_other = load.num_other_tokens + len(rows) - len(mine) - num_plain + taken
            rest = replace(load, num_other_tokens=num_other, num_plain=num_plain, room=max(0, load.room - taken))
            for index, request in zip(mine, policy.decide([rows[index] for index in mine], rest)):
                requests[index] = request
        return requests

    def observe_row(self, key: str, num_drafted: int, num_accepted: int, confidences: Sequence[float] = ()) -> None:
        self._adaptive.observe_row(key, num_drafted, num_accepted, confidences)

    def observe_proposal(self, confidences: Sequence[float]) -> None:
        self._adaptive.observe_proposal(confidences)

    def forget(self, key: str) -> None:
        self._adaptive.forget(key)

    def _policy(self, setting: DraftSetting | None) -> DepthPolicy:
        return self._default if setting is None else self._by_setting[setting]
