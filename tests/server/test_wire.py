"""Clients that send too much, too slowly or nothing: others are answered, and memory stays bounded."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from skim import LLM
from skim.server.wire import AcceptErrors, most_connections
from tests import tiny
from tests.live import NAME, LiveServer, eventually

MB = 2**20
COMPLETE = "/v1/completions"
SHORT = {"model": NAME, "prompt": "a", "max_tokens": 1}
HOST = b"Host: 127.0.0.1\r\n"
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    """Small limits, so that tests are short."""
    with LiveServer(
        llm, max_header_size="4K", header_timeout=0.5, body_timeout=0.5, max_connections=20
    ) as server:
        yield server


@pytest.fixture(scope="module")
def patient(llm: LLM) -> Iterator[LiveServer]:
    """A server on which only sizes are limited, not times."""
    with LiveServer(llm, max_header_size="4K", header_timeout=600, body_timeout=600) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skim.server.body.DISCARD_SECONDS", 0.2)


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def rest(wire: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := wire.recv(65536):
            found += part
    return found


def error(reply: bytes) -> dict[str, Any]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return dict(json.loads(body)["error"])


def answers(server: LiveServer) -> bool:
    with server.client() as http:
        return http.post(COMPLETE, json=SHORT).status_code == 200


def counted(server: LiveServer, reason: str) -> float:
    with server.client() as http:
        found = re.search(
            rf'failures_total{{[^}}]*reason="{reason}"[^}}]*}} ([\d.]+)', http.get("/metrics").text
        )
    return float(found[1]) if found else 0.0


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + JSON + b"\r\n"
ENDLESS_HEADS = {
    "value": b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000_000,
    "name": b"GET /health HTTP/1.1\r\n" + b"a" * 10_000_000,
    "url": b"GET /" + b"a" * 10_000_000,
    "many": b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 1_000_000,
    "trailer": CHUNKED + b"0\r\nX: " + b"a" * 10_000_000,
    "extension": CHUNKED + b"1;" + b"a" * 10_000_000,
}


@pytest.mark.parametrize("name", ENDLESS_HEADS)
def test_an_endless_head_is_cut_off(patient: LiveServer, name: str) -> None:
    """By its size: `rest` gives up long before the server's time is over."""
    before = counted(patient, "headers")
    with connect(patient) as wire:
        with contextlib.suppress(ConnectionError):
            wire.sendall(ENDLESS_HEADS[name])
        reply = rest(wire)
    assert not reply or reply.startswith(b"HTTP/1.1 431 "), reply[:200]
    assert counted(patient, "headers") == before + 1
    assert answers(patient)


def test_a_head_that_is_too_large_but_complete_is_answered_431(server: LiveServer) -> None:
    with connect(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 5000 + b"\r\n\r\n")
        reply = rest(wire)
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert "--max-header-size" in error(reply)["message"]


def test_small_chunks_and_trailers_are_no_attack(server: LiveServer) -> None:
    raw = json.dumps({**SHORT, "prompt": "a" * 500}).encode()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in raw)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n" + HOST + JSON
    )
    with connect(server) as wire:
        wire.sendall(head + b"\r\n")
        for start in range(0, len(chunks), 1000):
            wire.sendall(chunks[start : start + 1000])
        wire.sendall(b"0\r\nX-Trailer: a\r\n\r\n")
        assert rest(wire).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("before", "sent"),
    [
        (0, b""),  # after an answer, uvicorn's own timeout for idle connections holds
        *((before, sent) for before in (0, 1) for sent in (b"\r\n", b"GET /hea", b"GET / HTTP/1.1\r\nX: a")),
    ],
)
def test_a_head_that_does_not_arrive_ends_the_connection(
    server: LiveServer, sent: bytes, before: int
) -> None:
    with connect(server) as wire:
        for _ in range(before):
            wire.sendall(b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n")
            assert b" 200 " in wire.recv(65536)
        wire.sendall(sent)
        reply = rest(wire)
    assert not reply or b" 408 " in reply


def test_a_trickle_does_not_extend_the_time_for_a_head(server: LiveServer) -> None:
    with connect(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n")
        until = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                wire.sendall(b"X")
                time.sleep(0.01)
        assert time.monotonic() < until, "the connection was never closed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_a_body_that_does_not_arrive_is_answered_408(server: LiveServer, path: str) -> None:
    with connect(server) as wire:
        wire.sendall(b"POST " if "v1" in path else b"GET ")
        wire.sendall(path.encode() + b" HTTP/1.1\r\nContent-Length: 1000\r\n" + HOST + JSON + b"\r\n{")
        reply = wire.recv(65536)
        assert reply.startswith(b"HTTP/1.1 408 ")
        rest(wire)  # the connection is closed, for nobody reads the rest


def test_a_request_that_follows_a_refused_body_at_once_is_answered(server: LiveServer) -> None:
    with connect(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nContent-Length: 70000\r\n" + HOST + b"\r\n")
        assert b" 413 " in wire.recv(65536)
        body = b"x" * 70_000
        wire.sendall(body + b"POST /tokenize HTTP/1.1\r\nContent-Length: 15\r\nConnection: close\r\n" + HOST)
        wire.sendall(JSON + b'\r\n{"prompt": "a"}')
        assert b" 200 " in rest(wire)


def test_a_route_without_a_body_refuses_a_large_one(server: LiveServer) -> None:
    with server.client() as http:
        assert http.request("GET", "/health", content=b"{}").status_code == 200
        reply = http.request("GET", "/health", content=b"x" * 70_000)
        assert reply.status_code == 413
        assert "65536" in reply.json()["error"]["message"]
        assert http.request("GET", "/health", content=(b"x" * 10_000 for _ in range(10))).status_code == 413


def test_bodies_of_many_clients_share_a_fixed_memory(llm: LLM) -> None:
    with (
        LiveServer(llm, max_body_size="1M", max_body_memory="2M", body_timeout=30) as server,
        contextlib.ExitStack() as stack,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n" + HOST + JSON + b"\r\n"
        for _ in range(2):
            wire = stack.enter_context(connect(server))
            wire.sendall(head + b" " * 999_000)  # never finished
        room = server.front_room
        eventually(lambda: room.used > 1_800_000)
        with server.client() as http:
            large = http.post(COMPLETE, json={**SHORT, "prompt": "a" * 900_000})
            assert large.status_code == 503
            assert large.headers["retry-after"]
            assert "--max-body-memory" in large.json()["error"]["message"]
        assert answers(server), "small bodies always find room"
        stack.close()
        eventually(lambda: room.used == 0)
        with server.client() as http:
            assert http.post(COMPLETE, json={**SHORT, "prompt": "a" * 900_000}).status_code == 400  # too long


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nX: ", b"unfinished body"], ids=["idle", "head", "body"]
)
def test_others_are_answered_while_more_connections_wait_than_are_allowed(llm: LLM, sent: bytes) -> None:
    body = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n" + HOST + JSON + b"\r\n{"
    with (
        LiveServer(llm, max_connections=20, header_timeout=60, body_timeout=60) as server,
        contextlib.ExitStack() as stack,
    ):
        for number in range(60):
            wire = stack.enter_context(connect(server))
            wire.sendall(body if sent == b"unfinished body" else sent)
            if number % 10 == 0:
                assert answers(server)
        assert answers(server)
        assert len(server.connections) <= 21
        assert counted(server, "connections") >= 40


def test_a_request_in_progress_is_never_replaced(llm: LLM) -> None:
    with LiveServer(llm, max_connections=3) as server, contextlib.ExitStack() as stack:
        long = {"model": NAME, "prompt": "once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        raw = json.dumps(long).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\nConnection: close\r\n" % len(raw)
        wires = []
        for _ in range(3):
            wire = stack.enter_context(connect(server))
            wire.sendall(head + HOST + JSON + b"\r\n" + raw)
            wires.append(wire)
            assert wire.recv(10).startswith(b"HTTP/1.1 2")
        late = stack.enter_context(connect(server))
        assert rest(late).startswith(b"HTTP/1.1 503 ")
        assert all(b"[DONE]" in rest(wire) for wire in wires)
        assert answers(server)


def test_the_limit_of_open_files_leaves_room_for_other_files() -> None:
    assert most_connections(1024, 2**20) == 1024
    assert most_connections(1024, 1024) == 768
    assert most_connections(1024, 256) == 128
    assert most_connections(1024, resource.RLIM_INFINITY) == 1024


def test_accept_errors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    handler = AcceptErrors()
    others: list[Any] = []

    class Loop:
        default_exception_handler = staticmethod(others.append)

    for _ in range(1000):
        handler(Loop(), {"message": "accept", "exception": OSError(24, "Too many open files")})  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections: Too many open files; raise `ulimit -n`"
    ]
    handler(Loop(), {"message": "other", "exception": ValueError("x")})  # type: ignore[arg-type]
    assert len(others) == 1


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
sys.argv = ["skim", "serve", *sys.argv[1:]]
from skim.cli import start
start()
"""


def test_more_half_sent_heads_than_files_keep_nobody_out(tmp_path: Any) -> None:
    """A whole process whose limit of open files is lower than the number of attackers."""
    model = tiny.save("llama", tmp_path / "llama")
    arguments = [str(model), "--port", "0", "--kv-memory", "8M", "--served-model-name", NAME]
    with (
        open(tmp_path / "log", "w+b") as log,
        subprocess.Popen([sys.executable, "-c", SERVER, *arguments], stderr=log) as process,
    ):
        try:
            address: list[str] = []

            def ready() -> bool:
                assert process.poll() is None
                address[:] = re.findall(r"ready: .*?(http://[\d.]+:\d+)", (tmp_path / "log").read_text())
                return bool(address)

            eventually(ready, seconds=120)
            [url] = address
            before = psutil.Process(process.pid).memory_info().rss
            host, port = url.removeprefix("http://").split(":")
            stop = threading.Event()
            failures: list[Exception] = []

            def ask() -> None:
                try:
                    while not stop.is_set():
                        assert httpx.get(f"{url}/health", timeout=60, trust_env=False).status_code == 200
                        time.sleep(0.05)
                except Exception as raised:
                    failures.append(raised)

            asking = threading.Thread(target=ask)
            asking.start()
            with contextlib.ExitStack() as stack:
                for _ in range(700):
                    wire = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                    with contextlib.suppress(ConnectionError):
                        wire.sendall(b"GET /health HTTP/1.1\r\nX: ")
                reply = httpx.post(f"{url}{COMPLETE}", json=SHORT, timeout=60, trust_env=False)
                assert reply.status_code == 200
            stop.set()
            asking.join(120)
            assert not failures
            eventually(lambda: psutil.Process(process.pid).num_fds() < 100)
            assert psutil.Process(process.pid).memory_info().rss < before + 64 * MB
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (tmp_path / "log").stat().st_size < 100_000
    assert "raise `ulimit -n`" in (tmp_path / "log").read_text()
