"""schemathesis over our own OpenAPI document: what fits it, or nearly does, gets an answer that it describes."""

from __future__ import annotations

import schemathesis
from fake_server import FakeServer
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
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

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


DOCUMENT = document(post_routes(Service(ServerConfig(), EngineConfig())))
schema = schemathesis.openapi.from_dict(DOCUMENT)


def test_the_server_hands_out_the_same_document(fake: FakeServer) -> None:
    assert fake.get("/openapi.json").json() == DOCUMENT


@schema.parametrize()
@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_sent_gets_an_answer_of_the_schema(fake: FakeServer, case: Case) -> None:
    response = case.call(base_url=fake.url, timeout=300)
    case.validate_response(response, checks=CHECKS)
