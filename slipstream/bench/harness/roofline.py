"""The bandwidth's limit on a decoding step: the bytes that it must move.

Counted: every weight that takes part but the embedding table (of experts, those that the step is expected to touch);
the KV before the tokens; the recurrent states, read and written. No step is charged with activations. Where rows
without drafts store their states later than in each step (decision 25), large plain steps write less than is counted.
"""

from __future__ import annotations

from slipstream.runners.backend import StepTraffic


def step_bytes(traffic: StepTraffic, rows: int, depth: int, context: int) -> int:
    """Verification of ``depth`` drafts of each row, and as many passes of the head after it."""
    touched = expected_experts(traffic.expert_share, rows * (1 + depth))
    moved = traffic.dense + int(traffic.experts * touched)
    moved += rows * (context * traffic.kv_per_token + 2 * traffic.states)
    if depth:
        # The head is fed the step's tokens, which yields the first drafts; each further pass has a token of each row.
        in_pass = expected_experts(traffic.expert_share, rows)
        moved += traffic.head_dense + int(traffic.head_experts * touched)
        moved += (depth - 1) * (traffic.head_dense + int(traffic.head_experts * in_pass))
        moved += depth * traffic.draft_output
    return moved


def expected_experts(share: float, num_tokens: int) -> float:
    """The share of experts that some of the tokens choose, if each chooses that share at random."""
    return 1.0 - (1.0 - share) ** num_tokens
