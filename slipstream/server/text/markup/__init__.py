"""What the text of an answer means: thinking and calls of tools, read while it comes. See reader.py."""
