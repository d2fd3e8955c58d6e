"""Conversations whose turns repeat what was said before: what `slipstream bench turns` sends."""
