"""schemathesis on a live server: requests that `/openapi.json` allows, and requests that it forbids.

A forbidden request has a value of the wrong type or out of range, or lacks a required field; it must be
refused. Unknown fields are allowed. `REFUSED` lists what the document cannot forbid and the server refuses.
"""

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
from tests.live import NAME, LiveServer

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
FEW, MANY = 10, 120
"""Cases per mode, for a route with a body: in every run, and in the slow one."""
statuses: Counter[tuple[int, str, GenerationMode, int]] = Counter()
cases_of = pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with (
        LLM(
            path,
            progress=False,
            kv_memory="8M",
            max_model_len=96,
            max_num_seqs=16,
            checkpoint_dir=str(tmp_path_factory.mktemp("kept")),
        ) as llm,
        LiveServer(llm, admin_key="root", max_n=4) as server,
    ):
        yield server
        assert llm.stats().running == llm.stats().waiting == 0


@pytest.fixture(scope="module")
def document(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@cases_of
@pytest.mark.parametrize(
    ("endpoint", "mode"),
    [
        pytest.param(endpoint, mode, id=f"{endpoint.method} {endpoint.path}-{mode.value}")
        for endpoint in ENDPOINTS
        for mode in GenerationMode
        if endpoint.body or mode is GenerationMode.POSITIVE  # without a body nothing can be invalid
    ],
)
def test_the_server_conforms_to_its_document(
    document: Any, server: LiveServer, endpoint: Any, mode: GenerationMode, cases: int
) -> None:
    operation = document[endpoint.path.replace(":path", "")][endpoint.method]
    headers = ADMIN if endpoint.path.startswith("/admin/") else None
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS

    @seed(1)
    @settings(
        max_examples=cases if endpoint.body else 10,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        reply = case.call_and_validate(base_url=server.url, headers=headers, checks=checks, timeout=60)
        statuses[cases, endpoint.path, mode, reply.status_code] += 1

    run()
    server.llm.engine.unpark()  # a park that the document allows refuses the requests of other tests


TEXT = {"role": "user", "content": "hi"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
PICTURE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b"}}]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [IMAGE]}, "messages[0].content[0].type"),
    ("/v1/chat/completions", {"messages": [TEXT], "audio": {"voice": "a"}}, "audio"),
    ("/v1/chat/completions", {"messages": [TEXT], "modalities": ["audio"]}, "modalities[0]"),
    ("/v1/chat/completions", {"messages": [TEXT], "n": 5}, "n"),
    ("/v1/chat/completions", {"messages": [TEXT], "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": [TEXT], "skim": {"keep": "all"}}, "skim.keep"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 96}]}, ""),
    ("/v1/completions", {"prompt": ""}, ""),
    ("/v1/completions", {"prompt": [10**6]}, ""),
    ("/v1/completions", {"prompt": "hi", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ("/v1/completions", {"prompt": "hi", "guided_regex": "("}, "guided_regex"),
    ("/v1/responses", {"input": "hi", "background": True}, "background"),
    ("/v1/responses", {"input": "hi", "previous_response_id": "resp_0"}, "previous_response_id"),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/messages", {"messages": [PICTURE], "max_tokens": 1}, ""),
    ("/v1/messages", {"messages": [TEXT]}, ""),
    ("/tokenize", {"prompt": "hi", "messages": [TEXT]}, "prompt"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
]
"""Routes, bodies that they must refuse, and the field that the error names; empty if none."""


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=str)
def test_these_are_refused(server: LiveServer, path: str, body: dict[str, Any], field: str) -> None:
    with server.client() as http:
        reply = http.post(path, json={"model": NAME, **body})
    assert (reply.status_code, reply.json()["error"].get("param") or "") == (400, field), reply.text


def test_errors_of_the_connection_are_described_on_every_route(document: Any) -> None:
    operations = [one for each in document.raw_schema["paths"].values() for one in each.values()]
    assert len(operations) == len(ENDPOINTS)
    for operation in operations:
        assert "headers" in operation["responses"]["431"]["description"]
    unavailable = document.raw_schema["paths"]["/v1/completions"]["post"]["responses"]["503"]["description"]
    for cause in ("loading", "parked", "shutting down", "stalled", "dead", "no room"):
        assert cause in unavailable


@cases_of
def test_enough_cases_ran_and_both_outcomes_were_seen(cases: int) -> None:
    """Runs last in this file and checks the requests of the tests above."""
    ran = {key[1:]: count for key, count in statuses.items() if key[0] == cases}
    print(f"{sum(ran.values())} cases")
    assert sum(ran.values()) >= (800 if cases == MANY else 200)
    for path in {endpoint.path for endpoint in ENDPOINTS if endpoint.body}:
        assert any(ran.get((path, GenerationMode.NEGATIVE, status)) for status in (400, 404)), path
        if cases == MANY and not path.startswith("/admin/checkpoints"):  # no generated name was saved before
            assert ran.get((path, GenerationMode.POSITIVE, 200)), path
