"""Matrices that a folder stores as several tensors: what they are is read from the tensors, never from config.json."""
