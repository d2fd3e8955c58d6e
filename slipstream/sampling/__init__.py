"""The definition of the next token: parameters, masks, constraints. Free of any array library."""

from slipstream.sampling.constraints import AllOf, Constraint, Matcher
from slipstream.sampling.defaults import NEUTRAL, SamplingDefaults
from slipstream.sampling.matcher import matcher_for
from slipstream.sampling.params import MAX_DEPTH, MAX_TOP_LOGPROBS, DraftSetting, SamplingParams, check_draft
from slipstream.sampling.thinking import AfterThinking, ThinkingBudget

__all__ = [
    "MAX_DEPTH",
    "MAX_TOP_LOGPROBS",
    "NEUTRAL",
    "AfterThinking",
    "AllOf",
    "Constraint",
    "DraftSetting",
    "Matcher",
    "SamplingDefaults",
    "SamplingParams",
    "ThinkingBudget",
    "check_draft",
    "matcher_for",
]
