"""Ollama's protocol, as its client libraries and Open WebUI use it."""
