"""Apple silicon, and MLX on Linux: mlx-lm's model classes under the host-driven step, with caches of our own."""
