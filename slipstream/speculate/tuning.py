"""All constants of the adaptive policy, each with its effect and the entry of docs/LOG.md that it came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AcceptanceTuning:
    """Acceptance by position, for runners that report no confidences. No measurement in the log."""

    prior_rate: float = 0.75  # acceptance assumed before anything was seen
    prior_trials: float = 8.0  # trials that this assumption counts for
    engine_weight: float = 24.0  # trials that the engine's estimate counts for in a row's
    engine_decay: float = 0.998  # of the engine's old trials, per trial
    row_decay: float = 0.98  # of a row's old trials, per trial
    idle_decay: float = 0.995  # of a row's trials at a position, per step that did not try it: no verdict is final
    optimism: float = 1.5  # hits added to the engine's estimate: an unlucky start must not end drafting


@dataclass(frozen=True, slots=True)
class ConfidenceTuning:
    """Acceptance by confidence, counted in a table because no formula fits every head (log 46)."""

    num_bins: int = 16  # of confidence, equally wide; no measurement in the log
    prior_confidence: float = 0.75  # of each draft, before anything was seen; no measurement in the log
    prior_trials: float = 8.0  # trials that each bin and position starts with; no measurement in the log
    decay: float = 0.998  # of old trials of a position or a bin, per trial: 256 rows make many in a step (log 135)
    row_decay: float = 0.98  # of a row's old trials, per trial; no measurement in the log
    row_prior_trials: float = 24.0  # trials at a ratio of 1 that each row starts with; no measurement in the log
    max_acceptance_ratio: float = 1.25  # a row's is not believed to be higher; no measurement in the log
    refresh_chains: int = 16  # chains observed between two computations of the shares; no measurement in the log


@dataclass(frozen=True, slots=True)
class CostTuning:
    """How the cost curves follow the steps."""

    scale_rate: float = 0.1  # of an error, to the whole curve: most drifts are the machine's, at every size (log 71)
    point_rate: float = 0.02  # of an error, to the points next to it once they have seen enough (log 71)
    calibration_weight: float = 30.0  # observations that a calibrated point counts for (log 71)
    num_settling: int = 64  # first observations that move the whole curve only: real rows are longer (log 75)
    max_error: float = 1.5  # times the expected seconds; a slower step met a hiccup and counts as this (log 47)
    min_error: float = 1.0 / 3.0  # the same for fast steps; 1 / 1.5 could not unlearn a slow calibration (log 47)
    spacing: float = (
        1.5  # an observation further than this factor from every point is a new one; no measurement in the log
    )
    context_span: float = 8192.0  # KV tokens: a change as large counts as much as the slope that it started from
    context_rate: float = 0.125  # at which the KV tokens of the last steps are followed; no measurement in the log
    context_decay: float = 0.999  # of what the slope was learned from, per step; no measurement in the log
    max_context_error: float = 4.0  # as max_error; a hiccup counts only where the context changes; none in the log
    max_context_share: float = 0.9  # of a step's seconds, for attention; no measurement in the log
    max_row_share: float = 0.5  # of a step's seconds, for the per-row part; no measurement in the log
    other_rate: float = 0.05  # at which the time outside of the runner is followed (that it counts: log 7)


@dataclass(frozen=True, slots=True)
class DepthTuning:
    """How depths are chosen from chances and costs."""

    untimed_depth: int = 2  # while no step was timed yet; no measurement in the log
    min_gain: float = 1.01  # factor that drafting must promise over no drafts; 1.02 lost at a knee (log 77)
    idle_steps: int = 8  # for which the choice of no drafts stands before it is made again (log 77)
    probe_steps: int = 64  # between two probes; no measurement in the log
    probe_share: float = 0.005  # of the time since the last probe, for the next one; no measurement in the log
    plain_probes: int = 4  # one of so many probes is a step without drafts, to time it; no measurement in the log
    probes_of_a_row: int = 16  # that does not draft, before it is another's turn (log 263)
    plain_share: float = 0.03  # of the steps' time, for drafting next to rows that want no drafts (log 94)


@dataclass(frozen=True, slots=True)
class Tuning:
    acceptance: AcceptanceTuning = field(default_factory=AcceptanceTuning)
    confidence: ConfidenceTuning = field(default_factory=ConfidenceTuning)
    costs: CostTuning = field(default_factory=CostTuning)
    depth: DepthTuning = field(default_factory=DepthTuning)


TUNING = Tuning()
