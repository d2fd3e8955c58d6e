"""Token ids to text, and text to the parts of an answer: thinking, content, tool calls."""
