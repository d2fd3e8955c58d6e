"""Quantised matrices as codes and scales, whatever file they came from: codes.py is the form, types.py leads there."""
