"""HTTP in front of the engine: protocols, page, status, metrics, and how the process comes up and goes down.

Knows no array library and no command line: `commands/serve.py` hands it a way to load a model.
"""
