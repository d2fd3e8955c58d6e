"""Other people's clients, unmodified, against `slipstream serve`: `python -m clients`, or `make clients`."""
