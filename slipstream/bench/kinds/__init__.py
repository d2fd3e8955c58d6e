"""One file for each kind of `slipstream bench`, and selfcheck."""
