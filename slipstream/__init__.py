"""Slipstream: an LLM inference server in which every stream of the batch drafts with the model's own MTP head."""

from slipstream.llm import LLM, Output
from slipstream.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "SamplingParams"]
