"""Streams speak early: headers at once, comments while nothing else is sent, errors as events.

`python -m tests.server.test_streams` writes the chunks of `REQUESTS` anew into `chunks.json`.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from skim import LLM
from tests import tiny
from tests.live import NAME, LiveServer, eventually, held_engine, slow_steps

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
CHUNKS = Path(__file__).with_name("chunks.json")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LONG = "a long prompt. " * 60  # 900 tokens: one per byte
ENDLESS: dict[str, Any] = {
    "model": NAME,
    "prompt": "once",
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
READING: dict[str, Any] = {**ENDLESS, "prompt": LONG, "max_tokens": 2, "skim": {"use_prefix_cache": False}}

_HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**_HI}),
    "chat with usage": (CHAT, {**_HI, "stream_options": {"include_usage": True}}),
    "chat with n": (CHAT, {**_HI, "n": 2, "seed": 3, "temperature": 1.0}),
    "chat with tools": (CHAT, {**_HI, "tools": [WEATHER], "tool_choice": "auto"}),
    "completion": (COMPLETE, {"prompt": "once", "max_tokens": 4, "temperature": 0}),
    "completion with usage": (
        COMPLETE,
        {"prompt": "x", "max_tokens": 3, "temperature": 0, "stream_options": {"include_usage": True}},
    ),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with make_llm(tmp_path_factory.mktemp("tiny")) as llm:
        yield llm


def make_llm(path: Path) -> LLM:
    """A small random model that reads a prompt in steps of 64 tokens."""
    saved = tiny.save("llama", path / "llama")
    return LLM(saved, progress=False, kv_memory="8M", max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture(autouse=True)
def nothing_is_left_running(llm: LLM) -> Iterator[None]:
    yield
    eventually(lambda: llm.stats().running == llm.stats().waiting == 0)


def connect(server: LiveServer, **options: Any) -> openai.OpenAI:
    http = httpx.Client(trust_env=False)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http, **options
    )


def read(llm: LLM, body: dict[str, Any], **settings: Any) -> list[str]:
    """The lines of a stream, from a server with these settings."""
    with (
        LiveServer(llm, **settings) as server,
        server.client() as http,
        http.stream("POST", COMPLETE, json=body) as reply,
    ):
        assert reply.status_code == 200
        return [line for line in reply.iter_lines() if line]


def data_of(lines: list[str]) -> list[Any]:
    """The chunks among a stream's lines, without `[DONE]`."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in found if one != "[DONE]"]


def finished(lines: list[str]) -> bool:
    last = data_of(lines)[-1]
    return last["choices"][0]["finish_reason"] == "length" and last["skim"]["generated_tokens"] > 0


def comments_of(lines: list[str]) -> list[str]:
    return [line.removeprefix(": ") for line in lines if line.startswith(":")]


def timeless(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk without its id and times, and with only the counts of its report."""
    kept = {key: value for key, value in chunk.items() if key not in ("id", "created")}
    if "skim" in kept:
        kept["skim"] = {key: kept["skim"][key] for key in ("prompt_tokens", "generated_tokens")}
    return kept


def chunks(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    path, body = REQUESTS[name]
    skim = {"use_prefix_cache": False}
    with http.stream("POST", path, json={**body, "model": NAME, "stream": True, "skim": skim}) as reply:
        assert reply.status_code == 200
        lines = list(reply.iter_lines())
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return [timeless(chunk) for chunk in data_of(lines)]


# -- unmodified clients


@pytest.mark.parametrize("name", REQUESTS)
def test_chunks_are_the_same_with_and_without_comments(llm: LLM, name: str) -> None:
    """The chunks were recorded before streams had comments; later, `usage` got details, and the text that
    describes tools became shorter."""
    recorded = json.loads(CHUNKS.read_text())[name]
    with LiveServer(llm, keepalive=0) as silent, silent.client() as http:
        assert chunks(http, name) == recorded
    with slow_steps(llm, 0.02), LiveServer(llm, keepalive=0.005) as server, server.client() as http:
        assert chunks(http, name) == recorded


def test_openai_sees_no_comments(llm: LLM) -> None:
    ask: dict[str, Any] = {"model": NAME, "stream": True, **REQUESTS["chat"][1]}
    recorded = json.loads(CHUNKS.read_text())["chat"]
    with (
        slow_steps(llm, 0.03),
        LiveServer(llm, keepalive=0.01) as server,
        connect(server) as client,
        client.chat.completions.create(**ask) as stream,
    ):
        seen = [chunk.to_dict() for chunk in stream]
    assert [timeless(chunk) for chunk in seen] == recorded


# -- headers and comments


def test_headers_arrive_before_the_engine_makes_a_step(llm: LLM) -> None:
    with (
        held_engine(llm) as go,
        LiveServer(llm) as server,
        server.client() as http,
        http.stream("POST", COMPLETE, json=READING) as reply,
    ):
        assert (reply.status_code, reply.headers["x-accel-buffering"]) == (200, "no")
        assert not go.is_set()
        go.set()
        assert finished(list(reply.iter_lines()))


def test_comments_tell_the_progress_of_the_prompt(llm: LLM) -> None:
    with (
        LiveServer(llm, keepalive=0.05) as server,
        server.client() as http,
        held_engine(llm) as go,
        http.stream("POST", COMPLETE, json=READING) as reply,
    ):
        lines = reply.iter_lines()
        first = [next(lines) for _ in range(4)]
        assert first == [": queued", "", ": queued", ""]
        with slow_steps(llm, 0.1):
            go.set()
            rest = list(lines)
    shares = [int(found[1]) for one in comments_of(rest) if (found := re.fullmatch(r"reading (\d+)%", one))]
    assert len(set(shares)) > 3
    assert shares == sorted(shares)
    assert all(0 <= share < 100 for share in shares)
    assert finished(rest)


def test_comments_fill_the_gaps_between_slow_tokens(llm: LLM) -> None:
    body = {**ENDLESS, "max_tokens": 3}
    with slow_steps(llm, 0.2):
        lines = read(llm, body, keepalive=0.05)
    last = next(i for i in reversed(range(len(lines))) if lines[i].startswith("data: {"))
    assert ": generating" in lines[:last]


def test_keepalive_zero_sends_no_comment(llm: LLM) -> None:
    with slow_steps(llm, 0.1):
        assert comments_of(read(llm, {**ENDLESS, "max_tokens": 2}, keepalive=0)) == []


def ask_with(
    llm: LLM, step_seconds: float, timeout: httpx.Timeout, ask: dict[str, Any], **settings: Any
) -> list[Any]:
    """The chunks that openai's client sees of a server whose engine is slow."""
    with (
        slow_steps(llm, step_seconds),
        LiveServer(llm, **settings) as server,
        connect(server, timeout=timeout) as client,
    ):
        return list(client.completions.create(**ask))


def test_an_impatient_client_survives_a_long_prefill(llm: LLM) -> None:
    """15 steps of 0.15 s before the first token, and a read timeout of half that."""
    impatient = httpx.Timeout(30, read=1.0)
    ask: dict[str, Any] = {"model": NAME, "prompt": LONG, "max_tokens": 1, "stream": True}
    ask["extra_body"] = {"skim": {"use_prefix_cache": False}}
    began = time.perf_counter()
    assert ask_with(llm, 0.15, impatient, ask, keepalive=0.1)[-1].choices[0].finish_reason == "length"
    assert time.perf_counter() - began > 2.0
    with pytest.raises(openai.APITimeoutError):
        ask_with(llm, 0.15, impatient, ask, keepalive=0)


@pytest.mark.slow  # a minute and a half
def test_a_client_with_a_timeout_of_10_seconds_survives_a_prefill_of_60(llm: LLM) -> None:
    """The defaults of the server: a comment every 5 seconds."""
    ask: dict[str, Any] = {"model": NAME, "prompt": LONG, "max_tokens": 1, "stream": True}
    began = time.perf_counter()
    seen = ask_with(llm, 4.5, httpx.Timeout(30, read=10), ask)
    assert time.perf_counter() - began > 60
    assert seen[-1].choices[0].finish_reason == "length"


@pytest.mark.slow  # it measures time
def test_the_first_byte_arrives_within_50_ms_of_admission(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, admitted, took = llm.engine.submit, [0.0], []

    def noting(*positional: Any, **named: Any) -> Any:
        handle = submit(*positional, **named)
        admitted[0] = time.perf_counter()
        return handle

    monkeypatch.setattr(llm.engine, "submit", noting)
    with slow_steps(llm, 0.2), LiveServer(llm) as server, server.client() as http:
        for _ in range(21):
            with http.stream("POST", COMPLETE, json=READING) as reply:
                took.append(time.perf_counter() - admitted[0])
                assert reply.status_code == 200
            eventually(lambda: not server.service._running)
    took.sort()
    print(f"first byte after admission: median {took[10] * 1e3:.1f} ms, longest {took[-1] * 1e3:.1f} ms")
    assert took[10] < 0.05


# -- progress events


def test_progress_chunks_are_sent_on_request_only(llm: LLM) -> None:
    asked = {**READING, "skim": {**READING["skim"], "progress": True}}
    with slow_steps(llm, 0.1):
        seen, plain = data_of(read(llm, asked)), data_of(read(llm, READING))
    told = [chunk["skim"]["progress"] for chunk in seen if "progress" in chunk.get("skim", {})]
    assert told[0]["phase"] in ("queued", "reading")
    assert "reading" in [one["phase"] for one in told]
    assert all(one["total_tokens"] == len(LONG) for one in told)
    computed = [one["computed_tokens"] for one in told]
    assert computed == sorted(computed)
    assert len(set(computed)) > 2
    assert all(not chunk["choices"] for chunk in seen if "progress" in chunk.get("skim", {}))
    rest = [timeless(chunk) for chunk in seen if "progress" not in chunk.get("skim", {})]
    assert rest == [timeless(chunk) for chunk in plain]


def test_openai_reads_progress_chunks(llm: LLM) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    with slow_steps(llm, 0.05), LiveServer(llm) as server, connect(server) as client:
        found = list(
            client.chat.completions.create(
                **ask,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"skim": {"progress": True, "use_prefix_cache": False}},
            )
        )
    told = [chunk for chunk in found if "progress" in (getattr(chunk, "skim", None) or {})]
    assert told
    assert all(chunk.usage is None and not chunk.choices for chunk in told)
    assert found[-1].usage is not None


def test_progress_needs_a_stream(llm: LLM) -> None:
    body = {"model": NAME, "prompt": "a", "skim": {"progress": True}}
    with LiveServer(llm) as server, server.client() as http:
        reply = http.post(COMPLETE, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "skim.progress")


# -- refusals, failures and disconnects


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"temperature": -1}, 400), ({"prompt": "x" * 5000}, 400), ({"model": "another"}, 404), ({"n": 9}, 400)],
)
def test_a_refused_stream_still_has_its_status(llm: LLM, fields: dict[str, Any], status: int) -> None:
    with LiveServer(llm, max_n=4) as server, server.client() as http:
        reply = http.post(COMPLETE, json={**ENDLESS, **fields})
    assert reply.status_code == status
    assert "error" in reply.json()


@pytest.mark.parametrize("broken", ["forward", "reply"])
def test_a_failure_before_the_first_token_is_an_error_event(
    llm: LLM, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(*_: Any) -> Any:
        raise RuntimeError("it broke")

    if broken == "forward":
        monkeypatch.setattr(llm.engine.core.runner, "forward", bad)
    else:
        monkeypatch.setattr("skim.server.completions.CompletionReply._entries", bad)
    caplog.set_level(logging.CRITICAL)
    with LiveServer(llm) as server, server.client() as http, connect(server) as client:
        with http.stream("POST", COMPLETE, json=ENDLESS) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert reply.status_code == 200
        [failed] = data_of(lines)
        assert set(failed["error"]) == {"message", "type", "param", "code"}
        assert failed["error"]["type"] == "server_error"
        assert "data: [DONE]" not in lines
        message = "it broke" if broken == "forward" else "internal error: RuntimeError"
        with pytest.raises(openai.APIError, match=message):
            list(client.completions.create(model=NAME, prompt="a", stream=True))

        def both_are_counted() -> bool:  # after the client has read the event
            lines = http.get("/metrics").text.splitlines()
            return any("request_failures_total{" in line and line.endswith(" 2.0") for line in lines)

        eventually(both_are_counted)


def test_a_timeout_before_the_first_token_is_an_error_event(llm: LLM) -> None:
    with (
        held_engine(llm),
        LiveServer(llm, request_timeout=0.3, keepalive=0.05) as server,
        connect(server) as client,
        pytest.raises(openai.APIError, match="longer than"),
    ):
        list(client.completions.create(model=NAME, prompt="a", stream=True))


def test_a_client_gone_before_the_first_token_is_noticed(llm: LLM) -> None:
    aborted = llm.stats().outcomes.get("abort", 0)
    with held_engine(llm) as go, LiveServer(llm) as server, server.client() as http:
        with http.stream("POST", COMPLETE, json=ENDLESS) as reply:
            assert reply.status_code == 200
            assert server.service._running
        eventually(lambda: not server.service._running)
        assert not go.is_set()
        go.set()
        eventually(lambda: llm.stats().outcomes.get("abort", 0) == aborted + 1)


# -- recording


def record() -> None:
    with (
        tempfile.TemporaryDirectory() as path,
        make_llm(Path(path)) as llm,
        LiveServer(llm) as server,
        server.client() as http,
    ):
        recorded = {name: chunks(http, name) for name in REQUESTS}
    lines = (f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in recorded.items())
    CHUNKS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
