"""schemathesis over our own OpenAPI document: what fits it, or nearly does, gets an answer that it describes."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fake_server import FakeServer
from hypothesis import HealthCheck, settings
from jsonschema import Draft202012Validator
from schemathesis import Case, CheckContext, Response
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from slipstream.config import EngineConfig
from slipstream.server.http.app import document, post_routes
from slipstream.server.service.service import Service
from slipstream.server.service.settings import ServerConfig

DOCUMENT = document(post_routes(Service(ServerConfig(), EngineConfig())))
schema = schemathesis.openapi.from_dict(DOCUMENT)


def fits(body: Any, path: str) -> bool:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return Draft202012Validator({**content["schema"], "components": DOCUMENT["components"]}).is_valid(body)


def what_does_not_fit_is_rejected(context: CheckContext, response: Response, case: Case) -> bool | None:
    """schemathesis takes one of the names that a discriminator maps to the same schema for the only one."""
    try:
        return negative_data_rejection(context, response, case)
    except Failure:
        if case.method == "POST" and not case.query and fits(case.body, case.path):
            return None
        raise


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    what_does_not_fit_is_rejected,
    unsupported_method,
]


@pytest.mark.parametrize(("kind", "is_fitting"), [("input_text", True), ("image", False)])
def test_a_body_is_held_to_the_document_itself(kind: str, is_fitting: bool) -> None:
    messages = [{"role": "tool", "content": [{"type": kind, "text": ""}]}]
    assert fits({"messages": messages}, "/tokenize") is is_fitting


def test_the_server_hands_out_the_same_document(fake: FakeServer) -> None:
    assert fake.get("/openapi.json").json() == DOCUMENT


@schema.parametrize()
@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_sent_gets_an_answer_of_the_schema(fake: FakeServer, case: Case) -> None:
    response = case.call(base_url=fake.url, timeout=300)
    case.validate_response(response, checks=CHECKS)
