"""What "the next token" means, described once and free of any array library."""

from slipstream.sampling.constraints import Constraint, Matcher
from slipstream.sampling.params import MAX_DEPTH, MAX_TOP_LOGPROBS, DraftSetting, SamplingParams, check_draft

__all__ = ["MAX_DEPTH", "MAX_TOP_LOGPROBS", "Constraint", "DraftSetting", "Matcher", "SamplingParams", "check_draft"]
