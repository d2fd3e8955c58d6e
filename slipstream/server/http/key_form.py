"""What a browser sees that opens the page without the API key: a form that asks for it."""

from __future__ import annotations

import base64
import hashlib
from urllib.parse import parse_qs

from slipstream.server.http.wire import Headers, Receive, Scope, header, read_body

MAX_FORM = 4096  # bytes
FORM_SECONDS = 30.0
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { display: grid; place-content: center; min-height: 90vh; margin: 0 1rem; }
main { width: min(20rem, 100%); }
form { display: flex; flex-wrap: wrap; gap: .5rem; }
label { flex-basis: 100%; }
input, button { font: inherit; padding: .4rem .7rem; }
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Slipstream</title>
<style>{style}</style>
<main>
<h1>Slipstream</h1>
<form method="post" action="/">
<label for="key">{question}</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open</button>
</form>
</main>
</html>
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
FORM_HEADERS: Headers = [
    (
        b"content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'".encode(),
    ),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
]


def key_form(was_wrong: bool) -> bytes:
    question = "That is not a key of this server." if was_wrong else "This server asks for its API key."
    return PAGE.format(style=STYLE, question=question).encode()


def wants_form(scope: Scope) -> bool:
    """A browser that opens the page, as opposed to a script of it or a client."""
    return (scope["method"], scope["path"]) == ("GET", "/") and "text/html" in (header(scope, b"accept") or "")


def is_form(scope: Scope) -> bool:
    return (scope["method"], scope["path"]) == ("POST", "/")


async def read_key(scope: Scope, receive: Receive) -> str:
    fields = parse_qs((await read_body(scope, receive, MAX_FORM, FORM_SECONDS)).decode("latin-1"), max_num_fields=4)
    return next(iter(fields.get("key", [])), "")
