"""Apple silicon, and MLX on Linux: mlx-lm's model classes behind the runner protocol, with caches of our own."""
