"""OpenAI's protocols: chat completions, completions, responses."""
