"""From files to MLX: models and heads as mlx-lm's modules take them."""
