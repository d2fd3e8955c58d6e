"""Hugging Face folders: config.json, safetensors, tokenizer files; and the hub they come from."""
