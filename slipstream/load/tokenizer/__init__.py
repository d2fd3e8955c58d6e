"""Text <-> token ids and chat templates, whatever file the vocabulary came from."""
