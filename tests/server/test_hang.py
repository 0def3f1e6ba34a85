"""A step that hangs: `/health` notices, and SIGTERM still ends the process."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import httpx
import pytest

from tests import tiny
from tests.live import ServerProcess, eventually

NAME = "tiny"
DRAIN_SECONDS = 1.0
SLACK_SECONDS = 10.0  # after the drain timeout, the process has ended
ASKS = {"model": NAME, "prompt": "once", "max_tokens": 4, "stream": True}

HANGS = """
import sys, threading
from skim.engine.core import EngineCore

step = EngineCore.step

def hang(self):
    if self.lifecycle.requests:
        {hang}
    return step(self)

EngineCore.step = hang
from skim.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
WAITING = "threading.Event().wait()"
HOLDING_THE_GIL = "import re, time; time.sleep(2); re.match('(a+)+$', 'a' * 64 + 'b')"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama"))


def ask(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the process ends under it
        httpx.post(f"{url}/v1/completions", json=ASKS, timeout=60)


def start(server: ServerProcess) -> threading.Thread:
    server.wait_for("ready")
    asking = threading.Thread(target=ask, args=(server.url,), daemon=True)
    asking.start()
    return asking


def hanging_server(model: str, hang: str) -> ServerProcess:
    """`skim serve` whose first step with a request never ends."""
    settings = [model, "--kv-memory", "16M", "--drain-timeout", str(DRAIN_SECONDS), "--step-timeout", "0.5"]
    return ServerProcess(*settings, name=NAME, skim=[sys.executable, "-c", HANGS.format(hang=hang)])


def test_health_notices_a_step_that_does_not_end_and_sigterm_ends_the_process(model: str) -> None:
    with hanging_server(model, WAITING) as server:
        asking = start(server)
        eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
        health = httpx.get(f"{server.url}/health", timeout=30).json()
        assert health["status"] == "stalled"
        assert "step_timeout is 0.5 s" in health["reason"]
        refused = httpx.post(f"{server.url}/v1/completions", json=ASKS, timeout=30)
        assert refused.status_code == 503
        assert "step_timeout" in refused.json()["error"]["message"]
        [seconds] = [
            float(line.split()[-1])
            for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
            if line.startswith("skim:engine_step_seconds{")
        ]
        assert seconds > 0.5
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DRAIN_SECONDS + SLACK_SECONDS) == 1
        assert time.monotonic() - began < DRAIN_SECONDS + SLACK_SECONDS
        asking.join(30)
        server.exit_code()
        assert any("in hang" in line["message"] for line in server.log), "no stack of the hanging step"


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_step_holds_the_interpreter(model: str) -> None:
    """After the signal, no Python code runs any more, not even in the main thread."""
    with hanging_server(model, HOLDING_THE_GIL) as server:
        asking = start(server)
        eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DRAIN_SECONDS + SLACK_SECONDS) == 1
        asking.join(30)
        server.exit_code()
        assert any("in hang" in line for line in server.other), "no stacks of the threads"
