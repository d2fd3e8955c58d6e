"""Thinking and tool calls, recognised in the text of an answer while it streams. See reader.py."""
