"""Models without files, for benchmarks and memory plans: the shape of a real one, its weights made up."""
