"""`skim serve` from start to exit: signals, exit codes, terminal output."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim.cli.main import main
from skim.prefill.scoring.calibration import FILE_NAME
from skim.server.run import end_process_after
from tests import tiny
from tests.live import ServerProcess

NAME = "tiny"
LONG = {
    "model": NAME,
    "prompt": "once",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture
def server(model: str) -> Iterator[ServerProcess]:
    with ServerProcess(model, "--kv-memory", "16M", "--drain-timeout", "50", name=NAME) as server:
        told = server.wait_for("ready")
        [line] = [line for line in server.log if line["message"] == told]
        assert (line["model"], line["dtype"], line["sparse_prefill"]) == (NAME, "float32", "off")
        assert line["kv_pool_bytes"] <= 2**24
        assert f"context window {line['max_model_len']:,} tokens" in told
        yield server


class Reader(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.error: Exception | None = None
        self._url, self._body = url, body

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as reply:
                assert reply.status_code == 200
                for line in reply.iter_lines():
                    if line:
                        self.lines.append(line.removeprefix("data: "))
                        self.begun.set()
        except Exception as error:
            self.error = error

    @property
    def text(self) -> str:
        return "".join(json.loads(line)["choices"][0]["text"] for line in self.lines[:-1])


def start(url: str, count: int, **fields: Any) -> list[Reader]:
    readers = [Reader(url, {**LONG, **fields, "prompt": f"story {i}"}) for i in range(count)]
    for reader in readers:
        reader.start()
    for reader in readers:
        assert reader.begun.wait(60)
    return readers


def test_sigterm_under_load_loses_no_accepted_request(server: ServerProcess) -> None:
    url = server.url
    alone = start(url, 1)[0]
    alone.join()
    readers = start(url, 12)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    late = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": False}, timeout=10)
    assert late.status_code == 503
    assert late.json()["error"]["type"] == "service_unavailable_error"
    assert httpx.get(f"{url}/health", timeout=10).json()["status"] == "draining"
    assert server.exit_code() == 0
    for reader in readers:
        reader.join(10)
        assert reader.error is None
        assert reader.lines[-1] == "[DONE]"
        assert len(reader.text) > 0
        report = json.loads(reader.lines[-2])["skim"]
        assert report["generated_tokens"] == LONG["max_tokens"]
    assert readers[0].text == alone.text
    assert any("every accepted request was answered" in line["message"] for line in server.log)
    assert server.other == []


@pytest.mark.parametrize("seconds", ["0.2", pytest.param("0", marks=pytest.mark.slow)])
def test_a_drain_that_takes_too_long_ends_the_streams_with_an_error(model: str, seconds: str) -> None:
    with ServerProcess(model, "--kv-memory", "16M", "--drain-timeout", seconds, name=NAME) as server:
        server.wait_for("ready")
        readers = start(server.url, 12)
        assert server.stop() == 0
        for reader in readers:
            reader.join(10)
            assert reader.error is None
        ends = [reader.lines[-1] for reader in readers]
        cut = [json.loads(end)["error"] for end in ends if end != "[DONE]"]
        assert cut
        assert all("shut down" in error["message"] for error in cut)


def test_sigint_stops_an_idle_server_and_its_log_is_structured(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/v1/models", timeout=10).status_code == 200
    assert server.stop(signal.SIGINT) == 0
    [line] = [line for line in server.log if line["message"] == "request"]
    assert (line["path"], line["status"]) == ("/v1/models", 200)
    assert server.other == []


def test_without_a_drain_timeout_an_idle_server_aborts_nothing(model: str) -> None:
    with ServerProcess(model, "--kv-memory", "16M", "--drain-timeout", "0", name=NAME) as server:
        server.wait_for("ready")
        assert server.stop() == 0
        assert any("every accepted request was answered" in line["message"] for line in server.log)


@pytest.mark.parametrize("seconds", [1e300, float("inf"), 10.0])
def test_a_last_resort_that_cannot_be_set_is_no_error(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seconds == 10.0:
        monkeypatch.setattr(sys, "stderr", None)
    end_process_after(seconds)


@pytest.mark.parametrize("drain_timeout", ["1e300", pytest.param("5", marks=pytest.mark.slow)])
def test_sigterm_during_loading_stops_the_server(model: str, drain_timeout: str) -> None:
    """Also one whose last resort cannot be set, because the time is too long."""
    with ServerProcess(model, "--drain-timeout", drain_timeout, name=NAME) as server:
        server.wait_for("listening on")
        assert server.stop() == 0


@pytest.fixture
def own_logging() -> Iterator[None]:
    """A server in this process configures the logging of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_a_port_in_use_is_an_error_before_anything_is_loaded(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", model, "--port", str(port)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"port {port}" in line


@pytest.mark.usefixtures("own_logging")
def test_a_model_that_cannot_be_loaded_is_an_error_with_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 3
    assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("own_logging")
def test_a_scorer_that_cannot_be_built_is_an_error_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.save("llama", tmp_path)
    (path / FILE_NAME).write_text("{")
    capsys.readouterr()
    assert main(["serve", str(path), "--kv-memory", "16M", "--sparse-prefill", "auto", "--port", "0"]) == 2
    output = capsys.readouterr().err
    assert f"skim serve: the scorer 'blend' cannot be used: the calibration {path / FILE_NAME}" in output
    assert "calibrate again" in output
    assert "Traceback" not in output
    assert '"message": "ready' not in output
