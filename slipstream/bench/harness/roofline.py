"""The bandwidth's limit on a decoding step of one stream: the bytes that it cannot avoid to move.

Counted: every weight that takes part but the embedding table (of experts, those that the step is expected to touch);
the KV before the token; the recurrent states, read and written. No step is charged with activations: the limit is a
little too strict, never too mild.
"""

from __future__ import annotations

from slipstream.runners.backend import StepTraffic


def step_bytes(traffic: StepTraffic, depth: int, context: int) -> int:
    """Verification of ``depth`` drafts, and as many passes of the head after it."""
    touched = expected_experts(traffic.expert_share, 1 + depth)
    moved = traffic.dense + int(traffic.experts * touched) + context * traffic.kv_per_token + 2 * traffic.states
    if depth:
        # The head is fed the step's tokens, which yields the first draft; each further one is a pass of one token.
        moved += traffic.head_dense + int(traffic.head_experts * touched)
        moved += (depth - 1) * (traffic.head_dense + int(traffic.head_experts * traffic.expert_share))
        moved += depth * traffic.draft_output
    return moved


def expected_experts(share: float, num_tokens: int) -> float:
    """The share of experts that some of the tokens choose, if each chooses that share at random."""
    return 1.0 - (1.0 - share) ** num_tokens
