"""schemathesis on a live server: requests that `/openapi.json` allows, and requests that it forbids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks

from skim import LLM
from skim.server.routes import ENDPOINTS
from tests import tiny
from tests.live import LiveServer

load_all_checks()
from schemathesis.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ADMIN = {"Authorization": "Bearer root"}
CASES = 120  # per mode, for a route with a body
statuses: Counter[tuple[str, GenerationMode, int]] = Counter()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with (
        LLM(path, progress=False, kv_memory="8M", max_model_len=96, max_num_seqs=16) as llm,
        LiveServer(llm, admin_key="root", max_n=4) as server,
    ):
        yield server
        assert llm.stats().running == llm.stats().waiting == 0


@pytest.fixture(scope="module")
def document(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_the_server_conforms_to_its_document(
    document: Any, server: LiveServer, endpoint: Any, mode: GenerationMode
) -> None:
    operation = document[endpoint.path.replace(":path", "")][endpoint.method]
    if mode is GenerationMode.NEGATIVE and endpoint.body is None:
        pytest.skip("without a body nothing can be invalid")
    headers = ADMIN if endpoint.path.startswith("/admin/") else None
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS

    @seed(1)
    @settings(
        max_examples=CASES if endpoint.body else 10,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        reply = case.call_and_validate(base_url=server.url, headers=headers, checks=checks, timeout=60)
        statuses[endpoint.path, mode, reply.status_code] += 1

    run()


def test_errors_of_the_connection_are_described_on_every_route(document: Any) -> None:
    operations = [one for each in document.raw_schema["paths"].values() for one in each.values()]
    assert len(operations) == len(ENDPOINTS)
    for operation in operations:
        assert "headers" in operation["responses"]["431"]["description"]
    unavailable = document.raw_schema["paths"]["/v1/completions"]["post"]["responses"]["503"]["description"]
    for cause in ("loading", "shutting down", "stalled", "dead", "no room"):
        assert cause in unavailable


def test_enough_cases_ran_and_both_outcomes_were_seen() -> None:
    """Runs last in this file and checks the requests of the tests above."""
    assert sum(statuses.values()) >= 800
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/detokenize"):
        assert statuses[path, GenerationMode.POSITIVE, 200] > 0
        assert statuses[path, GenerationMode.NEGATIVE, 400] > 0
