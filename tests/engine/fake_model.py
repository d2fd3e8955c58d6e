"""The fake runner's model: the next token is a hash of the seed and the whole history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.engine.contract import TokenLogprobs

MASK = (1 << 61) - 1


def extend(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token + 1442695040888963407) & MASK


def next_token(digest: int, seed: int, vocab: int) -> int:
    digest = extend(digest, seed)
    mixed = (digest ^ (digest >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    return (mixed >> 17) % vocab


def continuation(prompt: Sequence[int], seed: int, vocab: int, count: int, ends: Iterable[int] = ()) -> tuple[int, ...]:
    """The model's own output, one token at a time, its end token included."""
    digest = 0
    for token in prompt:
        digest = extend(digest, token)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in ends):
        output.append(next_token(digest, seed, vocab))
        digest = extend(digest, output[-1])
    return tuple(output)


def opinion(digest: int, token: int, num_top: int) -> TokenLogprobs:
    """The model's log-probabilities of a token after a history: anything, but always the same."""
    chance = -float(extend(digest, token) % 1009)
    return TokenLogprobs(chance, tuple((digest % 7 + i, chance - i) for i in range(num_top)))


def opinions(tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of all tokens after the first."""
    digest, found = 0, []
    for token in tokens:
        found.append(opinion(digest, token, num_top))
        digest = extend(digest, token)
    return found[1:]
