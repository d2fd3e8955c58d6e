"""Bodies that schemathesis makes of a server's own OpenAPI document: half of them fit it, half do not."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import schemathesis
from fuzz_bodies import Fuzzed, limited
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode


def schema_bodies(document: dict[str, Any], count: int) -> list[Fuzzed]:
    """At least ``count``, as many of each operation."""
    found = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    operations = [operation for operation in found if operation.method.lower() == "post"]
    each = -(-count // (2 * len(operations)))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return [body for operation in operations for mode in modes for body in _bodies(operation, mode, each)]


def _bodies(operation: APIOperation, mode: GenerationMode, count: int) -> list[Fuzzed]:
    bodies: list[Fuzzed] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: Case) -> None:
        sent = case.as_transport_kwargs(base_url="http://localhost")
        value = sent.get("data", sent.get("json"))
        if isinstance(value, dict) and mode == GenerationMode.POSITIVE:
            value = limited(case.formatted_path, deepcopy(value))
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        bodies.append(Fuzzed(case.formatted_path, data))

    collect()
    return bodies
