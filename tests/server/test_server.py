"""Limits, keys, states and logs of a live server with a small random model."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim import LLM
from skim.server.logs import JsonFormatter
from skim.server.protocol.requests import REFUSED
from skim.server.routes import ENDPOINTS
from tests import tiny
from tests.live import NAME, LiveServer, eventually, slow_steps

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
JSON = {"Content-Type": "application/json"}
HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
HI = [{"role": "user", "content": "hi"}]
SOON = 10.0  # seconds; guards against hanging, far above the 1 s expected on an idle machine
ENDLESS = {"model": NAME, "prompt": "once", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(
        llm, max_n=4, max_prompts=4, max_stop_strings=3, max_stop_length=10, max_logit_bias=5
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left_running(llm: LLM) -> Iterator[None]:
    yield
    eventually(lambda: idle(llm))


def idle(llm: LLM) -> bool:
    """Nothing runs or waits, and only the prefix cache holds blocks."""
    stats = llm.stats()
    return stats.running == stats.waiting == 0 and stats.pool.live == stats.pool.evictable


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check that a reply is an error in OpenAI's format and return its error object."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HI, "max_tokens": 2, **fields}


# -- invalid input


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, path: str, field: str
) -> None:
    body = chat(**{field: 1}) if path == CHAT else {"model": NAME, "prompt": "a", field: 1}
    error = refused(http.post(path, json=body))
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role"),
        (chat(messages=[{"role": "user"}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
        (chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (
            chat(
                messages=[
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            ),
            "messages[0].content[0].type",
        ),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens="7"), "max_tokens"),
        (chat(temperature=-0.1), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(n=0), "n"),
        (chat(n=True), "n"),
        (chat(n=5), "n"),
        (chat(seed=2**70), "seed"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(stop=["a", "b", "c", "d"]), "stop"),
        (chat(stop="x" * 11), "stop"),
        (chat(stop=""), "stop"),
        (chat(stop_token_ids=[1, 2, 3, 4]), "stop_token_ids"),
        (chat(logit_bias={str(i): 1 for i in range(6)}), "logit_bias"),
        (chat(logit_bias={"x": 1}), "logit_bias.x"),
        (chat(logit_bias={"1": 101}), "logit_bias"),
        (chat(min_tokens=3, max_tokens=2), "min_tokens"),
        (chat(stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
        (chat(modalities=["text", "audio"]), "modalities[1]"),
        (chat(messages=[*HI, {"role": "assistant", "audio": {"id": "a"}}]), "messages[1].audio"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (chat(skim={"keep": 1}), "skim.keep"),
        (chat(skim={"cacheSalt": "a"}), "skim.cacheSalt"),
        (chat(skim={"keep_ratio": 0.1, "keep_tokens": 64}), "skim"),
        (chat(parallel_tool_calls="yes"), "parallel_tool_calls"),
        ({"model": NAME}, "messages"),
    ],
)
def test_a_malformed_chat_request_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    error = refused(http.post(CHAT, json=body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ([1, 2, -3], "prompt[2]", "greater than or equal to 0, got -3"),
        ([1, "two"], "prompt[1]", "valid integer, got 'two'"),
        (["one", 2], "prompt[1]", "valid string, got 2"),
        ([[1], [2, -1]], "prompt[1][1]", "greater than or equal to 0, got -1"),
        ([], "prompt", "at least 1 item"),
        ({"text": "hi"}, "prompt", "valid"),
    ],
)
def test_an_error_in_a_prompt_is_about_the_shape_that_was_meant(
    http: httpx.Client, prompt: Any, param: str, message: str
) -> None:
    error = refused(http.post(COMPLETE, json={"model": NAME, "prompt": prompt}))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], {}, 7, [1, "a"], [-1], [[]], [[1], []], [10**6], ["a"] * 5, "x" * 2000, None, [True]]
)
def test_a_malformed_prompt_is_refused(http: httpx.Client, prompt: Any) -> None:
    refused(http.post(COMPLETE, json={"model": NAME, "prompt": prompt, "max_tokens": 1}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe{}",
        b'{"model": "\xc3\x28", "prompt": "a"}',
        b'"' + b"a" * 1000,
        b"[" * 100_000,
    ],
    ids=["empty", "open", "null", "list", "bom", "utf8", "string", "deep"],
)
def test_a_body_that_is_not_a_request_is_refused_quickly(http: httpx.Client, raw: bytes) -> None:
    began = time.perf_counter()
    refused(http.post(COMPLETE, content=raw, headers=JSON))
    assert time.perf_counter() - began < SOON


@pytest.mark.parametrize(
    "body",
    [
        {"model": NAME, "prompt": [True] * 400_000},
        {"model": NAME, "prompt": [[0.5] * 400_000]},
        {"model": NAME, "prompt": "a", "n": 0, **{f"x{i}": 1 for i in range(150_000)}},
        {"model": NAME, "prompt": "a", "stop_token_ids": ["a"] * 400_000},
    ],
    ids=["booleans", "floats", "unknown", "strings"],
)
def test_a_body_with_very_many_mistakes_is_refused_quickly(http: httpx.Client, body: Any) -> None:
    raw = json.dumps(body).encode()
    began = time.perf_counter()
    refused(http.post(COMPLETE, content=raw, headers=JSON))
    assert time.perf_counter() - began < SOON


def test_a_text_far_beyond_the_context_window_is_refused_quickly(http: httpx.Client) -> None:
    began = time.perf_counter()
    error = refused(http.post(COMPLETE, json={"model": NAME, "prompt": "x " * 4_000_000}))
    assert time.perf_counter() - began < SOON
    assert error["code"] == "context_length_exceeded"


def test_a_disconnect_during_submission_leaves_nothing_running(
    server: LiveServer, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = llm.engine.submit
    entered, gone = threading.Event(), threading.Event()

    def slow_submit(*positional: Any, **named: Any) -> Any:
        entered.set()
        gone.wait(10)
        return submit(*positional, **named)

    monkeypatch.setattr(llm.engine, "submit", slow_submit)
    raw = json.dumps({**ENDLESS, "prompt": ["a", "b", "c"]}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(f"POST /v1/completions HTTP/1.1\r\n{HEAD}".encode())
        wire.sendall(f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert entered.wait(10)
    eventually(lambda: not server.service._running)
    gone.set()
    eventually(lambda: llm.stats().outcomes.get("abort", 0) > 0 and idle(llm))


@pytest.mark.slow  # it measures time
def test_small_writes_are_sent_at_once(http: httpx.Client) -> None:
    """Without TCP_NODELAY, a delayed ACK costs 40 ms per request on a kept-alive connection."""
    took = []
    for _ in range(9):
        began = time.perf_counter()
        http.post("/detokenize", json={"tokens": [1]})
        took.append(time.perf_counter() - began)
    assert sorted(took)[4] < 0.03


def test_a_request_whose_client_does_not_read_is_aborted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skim.server.reply.ERROR_GRACE_SECONDS", 0.2)
    body = {**ENDLESS, "n": 8, "stream": True, "logprobs": 20, "max_tokens": 900}
    raw = json.dumps(body).encode()
    with slow_steps(llm, 0.01), LiveServer(llm, request_timeout=1.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.sendall(f"POST {COMPLETE} HTTP/1.1\r\n{HEAD}Content-Length: {len(raw)}\r\n\r\n".encode())
            wire.sendall(raw)
            eventually(lambda: bool(server.service._running))
            eventually(lambda: not server.service._running, seconds=10)
            eventually(lambda: idle(llm))


def test_nan_is_not_a_number(http: httpx.Client) -> None:
    raw = b'{"model": "smollm2-135m", "prompt": "a", "temperature": NaN}'
    assert refused(http.post(COMPLETE, content=raw, headers=JSON))["param"] == "temperature"


def test_a_huge_body_is_refused_before_it_is_read(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        began = time.perf_counter()
        wire.sendall(
            f"POST {COMPLETE} HTTP/1.1\r\n{HEAD}Content-Length: 100000000\r\n\r\n".encode() + b"x" * 1000
        )
        assert b" 413 " in wire.recv(4096)
        assert time.perf_counter() - began < SOON


def test_a_huge_body_without_content_length_is_refused(llm: LLM) -> None:
    with LiveServer(llm, max_body_size="64K") as server, server.client() as http:
        reply = http.post(COMPLETE, content=(b"x" * 1000 for _ in range(1000)), headers=JSON)
        assert refused(reply, 413)["code"] == "body_too_large"
        assert http.post(COMPLETE, json={"model": NAME, "prompt": "a", "max_tokens": 1}).status_code == 200


def test_an_unknown_model_and_an_unknown_route(http: httpx.Client) -> None:
    assert refused(http.post(CHAT, json=chat(model="gpt-4")), 404)["code"] == "model_not_found"
    assert refused(http.get("/v1/models/gpt-4"), 404)["param"] == "model"
    unknown = refused(http.get("/v2/nothing"), 404)
    assert unknown["message"] == "there is no route GET /v2/nothing; GET /docs lists the routes"
    method = refused(http.get(CHAT), 405)
    assert method["message"] == f"there is no route GET {CHAT}; this path allows POST"


def test_a_prompt_that_is_too_long_has_its_own_error_code(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETE, json={"model": NAME, "prompt": "x" * 1024}))
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]


def test_a_schema_that_is_too_large_is_refused(llm: LLM) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    with LiveServer(llm, max_schema_size="1K") as server, server.client() as http:
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        assert refused(http.post(CHAT, json=chat(response_format=wanted)))["param"] == "response_format"
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert refused(http.post(CHAT, json=chat(tools=[tool], tool_choice="required")))["param"] == "tools"


EXPLOSIVE = {
    "deep": lambda: _nested(400),
    "wide enum": lambda: {"enum": ["x" * 50 + str(i) for i in range(20_000)]},
    "long string": lambda: {"type": "string", "minLength": 10**9},
    "long array": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "regex": lambda: {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    "remote": lambda: {"$ref": "http://127.0.0.1:9/schema.json"},
    "unsatisfiable": lambda: {"type": "string", "enum": [1]},
    "not a schema": lambda: {"type": "banana"},
}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("kind", EXPLOSIVE)
def test_an_explosive_schema_is_refused_and_the_server_goes_on(http: httpx.Client, kind: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": EXPLOSIVE[kind]()}}
    began = time.perf_counter()
    reply = http.post(CHAT, json=chat(response_format=wanted))
    took = time.perf_counter() - began
    if kind == "regex":
        assert reply.status_code == 200  # expanded lazily, only as far as the reply goes
    else:
        refused(reply)
    assert took < SOON
    assert http.post(CHAT, json=chat()).status_code == 200


# -- keys


def test_every_route_but_health_needs_the_key(llm: LLM) -> None:
    with LiveServer(llm, api_key="sésame", admin_key="root") as server, server.client() as http:
        routes = [(endpoint.method, endpoint.path.replace("{model:path}", NAME)) for endpoint in ENDPOINTS]
        for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nowhere")]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame".encode()}):
                status = http.request(method, path, headers=headers).status_code
                assert status == (200 if path == "/health" else 401), (path, headers)
        key = {"Authorization": "Bearer sésame".encode()}
        assert http.get("/v1/models", headers=key).status_code == 200
        assert http.get("/metrics", headers=key).status_code == 200
        refused(http.get("/admin/stats", headers=key), 403)
        admin = {"Authorization": "Bearer root"}
        assert http.get("/admin/stats", headers=admin).json()["running"] == 0
        refused(http.get("/v1/models", headers=admin), 401)


def test_admin_routes_are_off_without_an_admin_key(http: httpx.Client) -> None:
    assert refused(http.get("/admin/stats"), 403)["code"] == "admin_off"


def test_the_prefix_cache_can_be_reset(llm: LLM) -> None:
    with LiveServer(llm, admin_key="root") as server, server.client() as http:
        admin = {"Authorization": "Bearer root"}
        http.post(COMPLETE, json={"model": NAME, "prompt": "x" * 100, "max_tokens": 1})
        eventually(lambda: idle(llm))
        cold = http.get("/admin/stats", headers=admin).json()["pool"]["cold"]
        assert cold >= 6
        assert http.post("/admin/reset_prefix_cache", headers=admin).json() == {"freed_blocks": cold}
        assert llm.stats().pool.live == 0


# -- states


def test_health_says_loading_then_ok_then_draining(llm: LLM) -> None:
    with LiveServer(None) as server, server.client() as http:
        reply = http.get("/health")
        assert (reply.status_code, reply.json()) == (
            503,
            {
                "status": "loading",
                "reason": None,
                "prefill": None,
                "kv": None,
                "checkpoints": None,
                "decode": None,
                "weights": None,
                "residency": None,
            },
        )
        assert refused(http.post(CHAT, json=chat()), 503)
        assert http.post(CHAT, json=chat()).headers["retry-after"] == "5"
        server.service.ready(llm)
        reply = http.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (200, "ok")
        assert asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop).result(10)
        assert (http.get("/health").status_code, http.get("/health").json()["status"]) == (503, "draining")
        refused(http.post(CHAT, json=chat()), 503)


def test_a_dead_engine_shows_in_health(tmp_path: Path) -> None:
    mortal = LLM(tiny.save("llama", tmp_path), progress=False, kv_memory="8M")

    def die() -> bool:
        raise MemoryError("no more")

    with mortal, LiveServer(mortal) as server, server.client() as http:
        assert http.get("/health").status_code == 200
        mortal.engine.core.step = die  # type: ignore[method-assign]
        reply = http.post(CHAT, json=chat())
        assert "no more" in refused(reply, reply.status_code)["message"]
        assert reply.status_code in (500, 503)
        assert http.get("/health").json()["status"] == "dead"
        refused(http.post(CHAT, json=chat()), 503)


# -- time and queue limits


def test_the_queue_limit_counts_running_and_waiting_sequences(llm: LLM) -> None:
    with slow_steps(llm, 0.01), LiveServer(llm, max_queued_requests=0) as server, server.client() as http:
        assert "9 sequences" in refused(http.post(COMPLETE, json={**ENDLESS, "n": 9}))["message"]
        streams = [http.stream("POST", COMPLETE, json={**ENDLESS, "n": 4, "stream": True}) for _ in range(2)]
        with streams[0] as one, streams[1] as two:
            assert (one.status_code, two.status_code) == (200, 200)
            full = http.post(COMPLETE, json={**ENDLESS, "max_tokens": 1})
            assert refused(full, 429)["code"] == "queue_full"
            assert full.headers["retry-after"] == "1"
        eventually(lambda: idle(llm))
        assert http.post(COMPLETE, json={**ENDLESS, "max_tokens": 1}).status_code == 200


def test_a_request_that_takes_too_long_ends_and_frees_its_blocks(llm: LLM) -> None:
    with slow_steps(llm, 0.01), LiveServer(llm, request_timeout=0.3) as server, server.client() as http:
        assert refused(http.post(COMPLETE, json=ENDLESS), 408)["code"] == "timeout"
        with http.stream("POST", COMPLETE, json={**ENDLESS, "stream": True}) as reply:
            assert reply.status_code == 200
            events = [line for line in reply.iter_lines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert len(events) > 2
        assert "data: [DONE]" not in events
        eventually(lambda: idle(llm))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_disconnect_aborts_the_request(server: LiveServer, llm: LLM, path: str, stream: bool) -> None:
    before, steps = llm.stats().outcomes.get("abort", 0), llm.stats().steps
    body = chat(max_tokens=900, ignore_eos=True) if path == CHAT else ENDLESS
    raw = json.dumps({**body, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        eventually(lambda: llm.stats().running == 1)
    eventually(lambda: llm.stats().outcomes.get("abort", 0) == before + 1)
    assert idle(llm)
    assert llm.stats().steps - steps < 900


# -- engine failures


def test_a_failed_forward_is_a_500_for_its_requests_only(http: httpx.Client, llm: LLM) -> None:
    runner = llm.engine.core.runner
    good = runner.forward

    def bad(*_: Any) -> Any:
        runner.forward = good  # type: ignore[method-assign]
        raise RuntimeError("a kernel broke")

    runner.forward = bad  # type: ignore[method-assign]
    error = refused(http.post(CHAT, json=chat()), 500)
    assert "a kernel broke" in error["message"]
    assert http.post(CHAT, json=chat()).status_code == 200


def test_a_forward_that_fails_midway_ends_the_stream_with_an_error(http: httpx.Client, llm: LLM) -> None:
    runner = llm.engine.core.runner
    good = runner.forward
    with http.stream("POST", COMPLETE, json={**ENDLESS, "stream": True}) as reply:
        lines = reply.iter_lines()
        first = next(lines)

        def bad(*_: Any) -> Any:
            runner.forward = good  # type: ignore[method-assign]
            raise RuntimeError("a kernel broke")

        runner.forward = bad  # type: ignore[method-assign]
        rest = [line for line in lines if line]
    assert "text_completion" in first
    assert "a kernel broke" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]


# -- other routes


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    text = "naïve 🦜\n"
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
    assert tokens["max_model_len"] == 1024
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    rendered = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    assert (
        http.post("/detokenize", json={"tokens": rendered}).json()["prompt"] == "<s>user: hi\n<s>assistant: "
    )
    refused(http.post("/tokenize", json={}))
    refused(http.post("/tokenize", json={"prompt": "a", "messages": HI}))
    refused(http.post("/tokenize", json={"messages": HI, "add_special_tokens": True}))
    refused(http.post("/detokenize", json={"tokens": [258]}))


def test_text_parts_are_joined_and_developer_messages_become_system(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt == "<s>system: be brief\n<s>user: a\nb\n<s>assistant: "


def test_version_and_document(http: httpx.Client) -> None:
    import skim

    assert http.get("/version").json() == {"version": skim.__version__}
    document = http.get("/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(e.method, e.path.replace(":path", "")) for e in ENDPOINTS}


# -- logs


def test_every_request_is_one_structured_log_line(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="skim.requests")
    replies = [
        http.post(CHAT, json=chat(user="me", ignore_eos=True)),
        http.post(CHAT, json=chat(max_tokens=-1)),
    ]

    def lines() -> list[list[dict[str, Any]]]:
        """The log lines of each request. A line of an earlier test may still arrive."""
        logged = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        return [[line for line in logged if line["id"] == one.headers["x-request-id"]] for one in replies]

    eventually(lambda: all(lines()))
    [good], [bad] = lines()
    assert (good["method"], good["path"], good["status"]) == ("POST", CHAT, 200)
    assert (good["user"], good["finish_reason"], good["generated_tokens"]) == ("me", ["length"], 2)
    assert good["total_ms"] >= good["prefill_ms"] >= 0
    assert (bad["status"], bad["failure"]) == (400, "invalid")
    assert "max_tokens" in bad["error"]
