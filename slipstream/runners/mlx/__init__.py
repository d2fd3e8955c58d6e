"""Apple silicon, and MLX on Linux: mlx-lm's model classes under the host-driven step, with caches of our own."""

from slipstream.host import keeping_max_open_files

with (
    keeping_max_open_files()
):  # mlx-lm allows itself 2048 and at most 4096, for good: a server may have more connections
    import mlx_lm.utils  # noqa: F401
