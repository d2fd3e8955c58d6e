"""What "the next token" means, described once and free of any array library."""

from slipstream.sampling.params import MAX_DEPTH, DraftSetting, SamplingParams, check_draft

__all__ = ["MAX_DEPTH", "DraftSetting", "SamplingParams", "check_draft"]
