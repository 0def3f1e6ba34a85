"""`skim chat --url` against a small server from the standard library, on this machine only."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from skim.cli.converse import interrupted_once
from skim.cli.main import main
from tests.live import serving

HANG = object()
"""In a reply: send nothing more until the client hangs up."""


def chunk(text: str | None, finish_reason: str | None = None) -> str:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


DONE = "data: [DONE]\n\n"
HELLO = [
    ": a comment\n\n",
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n',
    chunk("Hel"),
    chunk("lo.\n"),
    chunk(None, "stop"),
    'data: {"choices": [], "usage": {"total_tokens": 5}}\n\n',
    DONE,
]


@dataclass
class Fake:
    """A scripted server: its answers, and the requests it received."""

    url: str = ""
    models: tuple[int, Any] = (200, {"data": [{"id": "first"}, {"id": "second"}]})
    replies: list[Any] = field(default_factory=list)  # chunks, or (status, JSON)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    fake = Fake()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            fake.keys.append(self.headers["Authorization"])
            self.answer(*fake.models)

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            fake.keys.append(self.headers["Authorization"])
            fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = fake.replies.pop(0)
            if isinstance(reply, tuple):
                self.answer(*reply)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for line in reply:
                if line is HANG:
                    self.wait_for_the_end()
                else:
                    self.wfile.write(line.encode())
                    self.wfile.flush()

        def answer(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

        def wait_for_the_end(self) -> None:
            if select.select([self.connection], [], [], 20)[0] and self.connection.recv(1) == b"":
                fake.hung_up.set()

    with serving(Handler) as fake.url:
        yield fake


Chat = Callable[..., int]


@pytest.fixture
def talk(server: Fake, monkeypatch: pytest.MonkeyPatch) -> Chat:
    def run(said: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        return main(["chat", "--url", server.url, *arguments])

    return run


def test_replies_are_joined_and_remembered(
    server: Fake, talk: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [HELLO, [chunk("Bye"), chunk("", "length"), DONE]]
    assert talk("Hi.\nGo.\n", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0.5") == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello.\nBye\n"
    assert shown.err == "(cut off by --max-tokens or the model's context window)\n"
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    later = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go."}]
    expected = {"model": "first", "stream": True, "temperature": 0.5, "max_tokens": 9}
    assert server.asked == [{**expected, "messages": first}, {**expected, "messages": first + later}]
    assert server.keys == [None, None, None]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_in_v1(ending: str, server: Fake, talk: Chat) -> None:
    server.replies = [HELLO]
    server.url += ending
    assert talk("Hi.\n", "second") == 0
    assert server.asked[0]["model"] == "second"


def test_the_key_comes_from_a_flag_or_the_servers_setting(
    server: Fake, talk: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [HELLO, HELLO]
    monkeypatch.setenv("SKIM_API_KEY", "hunter1")
    assert talk("Hi.\n") == 0
    assert talk("Hi.\n", "--api-key", "hunter2") == 0
    assert server.keys == ["Bearer hunter1"] * 2 + ["Bearer hunter2"] * 2


@pytest.mark.parametrize("key", ["hunter\n2", "hunterä2", ""])
def test_a_key_that_no_header_can_carry_is_not_shown(
    key: str, talk: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("Hi.\n", "--api-key", key) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("skim chat: ")
    assert "--api-key must be" in shown
    assert "hunter" not in shown


def test_settings_of_an_engine_are_refused_as_flags_and_ignored_elsewhere(
    server: Fake, talk: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in (["--block-size", "8"], ["--no-enable-prefix-caching"]):
        assert talk("Hi.\n", *flag) == 2
        assert capsys.readouterr().err.startswith(f"skim chat: {flag[0]} has no effect with --url")
    monkeypatch.setenv("SKIM_BLOCK_SIZE", "8")
    monkeypatch.setenv("SKIM_MODEL", "of-this-machine")
    server.replies = [HELLO]
    assert talk("Hi.\n") == 0
    assert server.asked[0]["model"] == "first"


ERROR = {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        ((400, ERROR), 2, "the prompt is too long\n"),
        ((429, ERROR), 1, "the prompt is too long\n"),
        ((401, ERROR), 1, "the prompt is too long (give the server's key as SKIM_API_KEY"),
        ((500, "<html>"), 1, "URL answered 500 Internal Server Error; check that --url"),
        ((307, {}), 1, "URL answered 307 Temporary Redirect; check that --url"),
        (["data: " + json.dumps(ERROR) + "\n\n"], 1, "the prompt is too long\n"),
        (['data: {"error": null}\n\n'], 1, "URL failed without a reason"),
        ([chunk("Hel")], 1, "URL ended the reply before it was complete"),
        (["data: <html>\n\n"], 1, "URL sent an invalid chat chunk: '<html>'"),
        (["data: 5\n\n"], 1, "URL sent an invalid chat chunk: '5'"),
        (['data: {"choices": [{}]}\n\n'], 1, "URL sent an invalid chat chunk: '{"),
    ],
)
def test_the_servers_error_is_shown(
    reply: Any, code: int, message: str, server: Fake, talk: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [reply]
    assert talk("Hi.\nNever sent.\n") == code
    assert len(server.asked) == 1
    assert capsys.readouterr().err.startswith("skim chat: " + message.replace("URL", server.url))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((200, {"data": []}), "URL lists no model; name one as MODEL"),
        ((200, "<html>"), "URL/v1/models did not answer with a list of models"),
        ((200, {"data": [5]}), "URL/v1/models did not answer with a list of models"),
        ((401, ERROR), "the prompt is too long (give the server's key"),
    ],
)
def test_a_server_with_another_protocol_is_reported(
    models: tuple[int, Any], message: str, server: Fake, talk: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = models
    assert talk("Hi.\n") == 1
    assert capsys.readouterr().err.startswith("skim chat: " + message.replace("URL", server.url))


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("http://127.0.0.1:9", 1, "cannot reach http://127.0.0.1:9: [Errno "),
        ("http://u:hunter2@127.0.0.1:9", 1, "cannot reach http://127.0.0.1:9: "),
        ("127.0.0.1:8000", 2, "--url: '127.0.0.1:8000' is not an address such as http://127.0.0.1:8000: "),
        ("localhost:8000", 2, "--url: 'localhost:8000' is not an address such as"),
        ("http://", 2, "--url: 'http://' is not an address"),
        ("http://127.0.0.1:port", 2, "--url: 'http://127.0.0.1:port' is not an address"),
        ("ftp://u:hunter2@127.0.0.1", 2, "--url: the given URL is not an address"),
    ],
)
@pytest.mark.usefixtures("server")
def test_an_unreachable_address_is_reported(
    url: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", url]) == code
    shown = capsys.readouterr().err
    assert shown.startswith(f"skim chat: {message}")
    assert "hunter2" not in shown
    assert code == 2 or "Connection refused; start a server there with `skim serve`" in shown


@pytest.mark.slow  # a real terminal, real signals: on a busy machine it may take long
def test_closing_the_connection_is_not_interrupted() -> None:
    hung_up = []

    def reply() -> None:
        with interrupted_once():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)  # as from somebody who presses it twice
                hung_up.append(True)

    with pytest.raises(KeyboardInterrupt):
        reply()
    assert hung_up
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("terminal", "pasted"),
    [("dumb", b"one\n  two\nthree\n"), ("xterm", b"\x1b[200~one\r  two\rthree\x1b[201~\r")],
)
def test_at_a_terminal(server: Fake, terminal: str, pasted: bytes, tmp_path: Path) -> None:
    """Typed lines, a reply that is interrupted, an error, pasted lines, the history, and Ctrl-D."""
    server.replies = [[chunk("Once upon"), HANG], (400, ERROR), HELLO, HELLO, HELLO]
    history = tmp_path / "chat_history.jsonl"
    history.write_text('"asked before"\n')
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "skim", "chat", "--url", server.url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": terminal, "SKIM_CACHE": str(tmp_path)},
    )
    os.close(slave)
    screen = ""

    def until(sign: str, *, interrupting: bool = False) -> str:
        """What appears up to and with `sign`.

        A signal that comes just before a system call waits for its end; after a while it is sent again, as
        a user would press Ctrl-C again.
        """
        nonlocal screen
        deadline = time.monotonic() + 60
        pressed = float("-inf")
        while sign not in screen:
            if interrupting and time.monotonic() > pressed + 2:
                pressed = time.monotonic()
                process.send_signal(signal.SIGINT)
            if select.select([master], [], [], 0.1)[0]:
                screen += os.read(master, 4096).decode()
            assert time.monotonic() < deadline, f"no {sign!r} in {screen!r}"
        seen, screen = screen.split(sign, 1)
        return seen + sign

    try:
        assert "/clear starts over" in until("> ")
        os.write(master, b"tell\n")
        until("Once upon")
        until("> ", interrupting=True)
        assert server.hung_up.wait(20), "the request goes on after it was interrupted"
        until("/exit or Ctrl-D ends", interrupting=True)
        until("> ")
        os.write(master, b"more\n")
        assert "skim chat: the prompt is too long" in until("> ")
        os.write(master, b"again\n")
        assert "Hello." in until("> ")
        os.write(master, pasted)
        assert "Hello." in until("> ")
        os.write(master, b"\x10" * 5 + b"\n")  # Ctrl-P: the message before all of these
        until("Hello.")
        until("> ")
        os.write(master, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    heard = [[message["content"] for message in asked["messages"]] for asked in server.asked]
    assert heard[:3] == [["tell"], ["tell", "Once upon", "more"], ["tell", "Once upon", "again"]]
    assert [each[-1] for each in heard[3:]] == ["one\n  two\nthree", "asked before"]
    kept = [json.loads(line) for line in history.read_text().splitlines()]
    assert kept == ["asked before", "tell", "more", "again", "one\n  two\nthree", "asked before"]
    assert history.stat().st_mode & 0o077 == 0
