"""Text of unknown origin in messages: nothing that a terminal would act on."""

from __future__ import annotations

import pytest

from slipstream.errors import RequestError, printable
from slipstream.server.errors import openai_error, to_api_error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve 世界 🙂 'x'", "naïve 世界 🙂 'x'"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x07\x7f\x9b", "\\x07\\x7f\\x9b"),
        ("\u202egnp.exe\u2028", "\\u202egnp.exe\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_errors_to_clients_keep_their_lines() -> None:
    error = to_api_error(RequestError("first\nsecond \x1b[31m"))
    assert openai_error(error)["error"]["message"] == "first\nsecond \\x1b[31m"
