"""The matcher of a request: all its constraints in one."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.sampling.constraints import AllOf, BadWords, Constraint, Matcher, MinTokens
from slipstream.sampling.masks import all_but
from slipstream.sampling.params import SamplingParams


def matcher_for(params: SamplingParams, end_tokens: Collection[int], vocab_size: int) -> Matcher | None:
    """All constraints of a request in one matcher; None: it has none."""
    parts: list[Constraint] = [] if params.constraint is None else [params.constraint]
    if params.bad_words:
        parts.append(BadWords(params.bad_words))
    matcher = AllOf(tuple(parts)).start(vocab_size, end_tokens) if parts else None
    if params.min_tokens and end_tokens:
        matcher = MinTokens(matcher, params.min_tokens, all_but(end_tokens, vocab_size))
    return matcher
