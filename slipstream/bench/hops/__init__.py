"""What a hop costs: a server whose answers say when they were written, and a client that reads them."""
