"""What `slipstream bench` measures."""
