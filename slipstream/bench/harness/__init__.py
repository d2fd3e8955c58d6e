"""What several benchmarks share: loaded engines, prompts, traffic, peers, reports."""
