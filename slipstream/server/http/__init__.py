"""Paths, sockets, security, and how the process starts and shuts down."""
