"""llama.cpp beside us, in the same run: the same GGUF, the same prompts, the same threads."""
