"""Sampling with PyTorch."""
