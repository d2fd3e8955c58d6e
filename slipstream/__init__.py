"""Slipstream: an LLM inference server in which every stream of the batch drafts with the model's own MTP head."""

__version__ = "0.1.0"
