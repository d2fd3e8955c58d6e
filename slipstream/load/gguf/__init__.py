"""GGUF files: header, metadata, tensors under canonical names, vocabulary."""
