"""Every number of a request at its extremes: each is answered or refused, and others are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from skim import LLM
from skim.server.routes import ENDPOINTS
from tests import paths, tiny
from tests.live import NAME, LiveServer

ROUTES = {
    endpoint.path: endpoint.body.__name__
    for endpoint in ENDPOINTS
    if endpoint.body is not None and not endpoint.path.startswith("/admin/")
}
TEXT = paths.BOOK[5000:5500].encode("ascii", "replace").decode() + "\n\nWhat is the code?"
NUMBERS = (
    *(-1, 0, 1, 2, 64, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 10**12, 10**400),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64),
    *(1e308, -1e308, 5e-324, 0.5, 1 - 2**-53, -0.0, float("nan"), float("inf")),
)
SKIM = {"sparse_prefill": "always", "scorer": "lexical"}

GENERATE = {"model": NAME, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "n": 1, "skim": SKIM}
BESIDE = {"skim": SKIM, "thinking": {"type": "enabled"}}
"""Fields that an object needs beside a number."""
IDLE = {
    ("skim", name)
    for name in (
        "decode_budget",
        "decode_candidates",
        "refresh_interval",
        "refresh_mass",
        "refresh_margin",
        "slow_fast_min_context",
    )
}
"""Refused by a server without slow-fast decode, whatever their value."""
SHORT = {"model": NAME, "temperature": 0.0, "skim": SKIM}
RANK = {"query": "a code", "documents": ["a code", TEXT]}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**GENERATE, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {**GENERATE, "prompt": TEXT},
    "/v1/responses": {**SHORT, "max_output_tokens": 16, "input": TEXT},
    "/v1/responses/input_tokens": {"model": NAME, "input": TEXT},
    "/v1/messages": {**SHORT, "max_tokens": 2, "messages": [{"role": "user", "content": TEXT}]},
    "/v1/messages/count_tokens": {"model": NAME, "messages": [{"role": "user", "content": TEXT}]},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANK),
    "/v1/skim": {"messages": [{"role": "user", "content": TEXT}], "skim": SKIM},
    "/v1/embeddings": {"input": [1, 2]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with (
        LLM(path, progress=False, kv_memory="16M", prefill_block_size=4, max_model_len=600) as llm,
        LiveServer(llm, request_timeout=30) as server,
        server.client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def slow_fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tiny.save("llama", tmp_path_factory.mktemp("slow-fast") / "llama")
    settings: dict[str, Any] = {"slow_fast": "on", "decode_budget": 300, "slow_fast_min_context": 1}
    with (
        LLM(path, progress=False, kv_memory="16M", max_model_len=600, **settings) as llm,
        LiveServer(llm, request_timeout=30) as server,
        server.client() as client,
    ):
        yield client


def test_numbers_of_slow_fast_decode_are_answered_or_refused(slow_fast: httpx.Client) -> None:
    """The server decodes slow-fast, and the prompt is longer than the budget, so the numbers are used."""
    body = {**GENERATE, "max_tokens": 6, "messages": [{"role": "user", "content": TEXT}]}
    plain: dict[str, Any] = {**body, "skim": {"sparse_prefill": "off"}}

    def ask(one: dict[str, Any]) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return slow_fast.post("/v1/chat/completions", content=json.dumps(one), headers=headers)

    expected = ask(plain).json()
    assert expected["skim"]["decode"]["fast"] > 0
    for _, name in sorted(IDLE):
        for number in NUMBERS:
            reply = ask({**plain, "skim": {**plain["skim"], name: number}})
            assert reply.status_code in (200, 400), (name, number, reply.text)
            assert reply.status_code == 200 or name in reply.json()["error"]["message"]
        assert ask(plain).json()["choices"] == expected["choices"], name


def numeric(fields: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of numbers in an object's schema; `[]` is an item of a list, `0` a key of a mapping."""
    for name, schema in fields.items():
        yield from ((name, *rest) for rest in _numeric(schema, schemas))


def _numeric(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if reference := schema.get("$ref"):
        schema = schemas[reference.rsplit("/", 1)[-1]]
    if schema.get("type") in ("integer", "number"):
        yield ()
    for variant in schema.get("anyOf", ()):
        yield from _numeric(variant, schemas)
    if isinstance(items := schema.get("items"), dict):
        yield from (("[]", *rest) for rest in _numeric(items, schemas))
    values = [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
    for value in values:
        if isinstance(value, dict) and schema.get("type") == "object":
            yield from (("0", *rest) for rest in _numeric(value, schemas))
    if "properties" in schema:
        yield from numeric(schema["properties"], schemas)


def placed(path: tuple[str, ...], number: float) -> Any:
    for name in reversed(path):
        number = [number] if name == "[]" else {name: number}  # type: ignore[assignment]
    return number


def fields_of(http: httpx.Client) -> dict[str, list[tuple[str, ...]]]:
    """The numbers of each route. Those that both have are tested at the first."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    seen: set[tuple[str, ...]] = set()
    found = {}
    for route, name in ROUTES.items():
        own = {field: one for field, one in schemas[name]["properties"].items() if field != "messages"}
        found[route] = sorted(set(numeric(own, schemas)) - seen)
        seen.update(found[route])
    assert {("skim", "neighbour_radius"), ("n",), ("logit_bias", "0"), ("prompt", "[]")} <= seen
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_no_number_of_a_request_holds_up_others(route: str, http: httpx.Client) -> None:
    paths = fields_of(http)[route]
    plain = PLAIN[route]

    def ask(body: dict[str, Any]) -> httpx.Response:
        return http.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})

    def told(reply: httpx.Response) -> Any:
        return {
            name: value
            for name, value in reply.json().items()
            if name
            in (
                "choices",
                "prompt",
                "tokens",
                "content",
                "input_tokens",
                "output_text",
                "results",
                "messages",
            )
        }

    expected = told(ask(plain))
    answered: set[tuple[str, ...]] = set()
    for path in paths:
        for number in NUMBERS:
            value = placed(path, number)[path[0]] if len(path) > 1 else number
            beside = BESIDE.get(path[0])
            reply = ask({**plain, path[0]: value if beside is None else {**beside, **value}})
            assert reply.status_code in (200, 400), (path, number, reply.text)
            if reply.status_code == 200:
                answered.add(path)
                continue
            error = reply.json()["error"]
            names = [name for name in path if name not in ("[]", "0", "skim")]
            said = f"{error.get('param')} {error['message']}"
            assert any(name in said for name in names), (path, number, error)
            assert len(said) < 500, (path, number)
        assert http.get("/health").json()["status"] == "ok", path
        assert told(ask(plain)) == expected, path
    assert not answered & IDLE
    usable = set(paths) - IDLE
    assert len(answered) >= len(usable) * 0.9, f"never accepted: {usable - answered}"
