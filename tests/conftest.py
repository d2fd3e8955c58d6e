"""What every room's tests share: hypothesis settings, and tiny checkpoints made once."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("slipstream", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("slipstream")
