"""Live servers over real sockets: in a thread, so that a test can inspect them, or in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from skim.config import ServerConfig
from skim.llm import LLM
from skim.server.run import http_server, listen
from skim.server.service import Service

NAME = "smollm2-135m"


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of an HTTP server in a thread, which stands in for another engine's."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


class LiveServer:
    """Serves `llm`; without one, stays in the loading state."""

    def __init__(self, llm: LLM | None, *, files: int = 2**16, **settings: Any) -> None:
        self.files = files
        self.config = ServerConfig(port=0, **settings)
        self.llm = llm
        self._listener = listen(self.config.host, 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._up = threading.Event()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self.config, NAME)
        if self.llm is not None:
            self.service.ready(self.llm)
        self._server = http_server(self.service, self.files)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._up.set()
        await serving

    @property
    def connections(self) -> Any:
        """The open connections."""
        return self._server.server_state.connections

    @property
    def front_room(self) -> Any:
        """The memory for bodies that are being received."""
        return self._server.config.app._room  # type: ignore[union-attr]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._up.wait(30), "the server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30)
        self._listener.close()


class ServerProcess:
    """`skim serve` as users run it: a separate process, on a free port."""

    def __init__(
        self,
        *arguments: str,
        name: str,
        port: int = 0,
        variables: Mapping[str, str] | None = None,
        skim: Sequence[str] = (sys.executable, "-m", "skim"),
        cwd: Path | None = None,
    ) -> None:
        command = [*skim, "serve", *arguments, "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", name],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(variables or {})},
            cwd=cwd,
            text=True,
        )
        self.log: list[dict[str, Any]] = []
        self.other: list[str] = []  # lines that are not JSON
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.other.append(line)

    def wait_for(self, words: str, seconds: float = 300) -> str:
        """The first log message that contains these words."""
        until = time.monotonic() + seconds
        while True:
            found = [line["message"] for line in list(self.log) if words in line["message"]]
            if found:
                return str(found[0])
            assert self.process.poll() is None, f"the server exited: {self.other}"
            assert time.monotonic() < until, f"no line with {words!r}: {self.log}"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        found = re.search(r"http://[\d.]+:\d+", self.wait_for("listening on"))
        assert found
        return found[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait, and return the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self, seconds: float = 300) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "the condition never became true"
        time.sleep(0.005)


@contextlib.contextmanager
def slow_steps(llm: LLM, seconds: float) -> Iterator[None]:
    """Slow the engine down, so that requests are still running when a test looks."""
    step = llm.engine.core.step

    def slower() -> bool:
        time.sleep(seconds)
        return step()

    llm.engine.core.step = slower  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.core.step = step  # type: ignore[method-assign]


@contextlib.contextmanager
def held_engine(llm: LLM) -> Iterator[threading.Event]:
    """An engine that makes no step until the event is set."""
    step, go = llm.engine.core.step, threading.Event()

    def waiting() -> bool:
        assert go.wait(60)
        return step()

    llm.engine.core.step = waiting  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        llm.engine.core.step = step  # type: ignore[method-assign]
