"""Everything between the protocols and the engine: admission, preparation, running generations, status, metrics."""
