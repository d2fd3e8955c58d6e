"""What to take where a folder cannot be used: how each refusal ends."""

OTHER_TYPES = "take the model in 4 bits (AWQ, GPTQ, compressed-tensors), FP8, NVFP4 or BF16, or as a GGUF"
OTHER_MODEL = "take a model without it, or --runner mlx if mlx-lm knows it"
AGAIN = "fetch it again, into an empty folder"  # damaged, or left over from another
PUBLISHED_CONFIG = "take the config.json that the model was published with"
