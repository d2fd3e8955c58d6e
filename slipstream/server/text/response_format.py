"""The format that a request asks its answer to have, before it is compiled to a grammar."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.grammar import Spec


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    spec: Spec
    where: str  # the request's field that asks for it, for error messages
