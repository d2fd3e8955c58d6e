"""The layers of a model on the GPU."""
