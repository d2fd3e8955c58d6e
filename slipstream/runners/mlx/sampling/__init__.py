"""Sampling with MLX."""
