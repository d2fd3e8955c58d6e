"""The APIs: for each its request model, the translation to a GenerationRequest, and the writer of its responses."""
