"""Stop strings and pieces: what a client sees depends on the text alone, not on how it was cut into tokens or steps."""

from __future__ import annotations

from fake_server import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from slipstream.server.text.output import OutputText
from slipstream.server.text.pieces import Score, text_of
from slipstream.server.text.stops import StopFinder

TEXT = st.text("ab<\n", max_size=40)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: read character by character; the first end of a stop string counts, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    text, chunks = draw(TEXT), []
    while text:
        size = draw(st.integers(1, 5))
        chunks.append(text[:size])
        text = text[size:]
    return chunks


@given(chunked(), STOPS)
def test_stop_strings_do_not_depend_on_the_pieces(chunks: list[str], stops: list[str]) -> None:
    finder, emitted = StopFinder(stops), ""
    for chunk in chunks:
        emitted += finder.push(chunk)
        if finder.matched is not None:
            break
    else:
        emitted += finder.finish()
    assert (emitted, finder.matched) == cut("".join(chunks), stops)


@given(chunked(), STOPS)
def test_emitted_text_is_never_taken_back(chunks: list[str], stops: list[str]) -> None:
    finder, seen, emitted = StopFinder(stops), "", ""
    for chunk in chunks:
        seen += chunk
        emitted += finder.push(chunk)
        assert cut(seen, stops)[0].startswith(emitted)
        if finder.matched is not None:
            return
        held = len(seen) - len(emitted)
        assert held < max(map(len, stops), default=1)


@given(TEXT, STOPS, st.lists(st.integers(0, 3), min_size=40, max_size=40), st.booleans())
def test_pieces_make_up_the_text_and_know_their_tokens(
    text: str, stops: list[str], origins: list[int], scored: bool
) -> None:
    tokens = TOKENIZER.encode(text)
    output, pieces = OutputText(TOKENIZER, stops), []
    for token, origin in zip(tokens, origins):
        pieces += output.push(token, origin, Score(bytes([token]), -1.0) if scored else None)
        if output.stop is not None:
            break
    else:
        pieces += output.finish()
    expected, stop = cut(text, stops)
    assert text_of(pieces) == expected
    assert [piece.origin for piece in pieces for _ in piece.text] == origins[: len(expected)]
    scores = [score.raw[0] for piece in pieces for score in piece.scores]
    assert scores == (tokens[: len(expected)] if scored else [])
    assert output.stop == stop
    assert output.num_tokens == len(expected) + len(stop or "")  # one token a character


def test_half_a_character_joins_the_next_piece() -> None:
    class Bytes:
        leading = b""

        def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
            return bytes([token])

    output = OutputText(Bytes(), [])  # type: ignore[arg-type]
    first, second = "é".encode()
    one, two, end = (Score(bytes([n]), -1.0) for n in (first, second, 0))
    assert output.push(65, 0) == [("A", 0, ())]
    assert output.push(first, 1, one) == []
    assert output.push(second, 2, two) == [("é", 2, (one, two))]
    assert output.push(66, 0) == [("B", 0, ())]
    assert output.push(first, 1) == []
    assert output.finish(end=True, score=end) == [("�", 0, (end,))]
    assert output.num_tokens == 6
