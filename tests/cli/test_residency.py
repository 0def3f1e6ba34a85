"""`skim park`, `skim unpark` and `skim status` against a live server with a small random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from skim import LLM
from skim.cli.main import main
from skim.cli.residency import listing
from skim.server import run as server_run
from tests import tiny
from tests.live import LiveServer, eventually, serving, slow_steps
from tests.server.test_residency import COMPLETE, LONG

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


@pytest.fixture
def server(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("SKIM_ADMIN_KEY", "root")
    with LiveServer(llm, admin_key="root", api_key="secret") as server:
        yield server
        llm.engine.unpark()


def run(capsys: Capture, *words: str) -> tuple[int, list[str], str]:
    """Exit code, lines of the output, and the error."""
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


def test_a_server_is_parked_shown_and_brought_back(server: LiveServer, capsys: Capture) -> None:
    at = ("--url", server.url)
    code, lines, _ = run(capsys, "status", *at)
    assert (code, lines[0], lines[1]) == (0, f"{server.url}: ok", "residency both")
    assert lines[2].split()[:5] == ["model", "place", "device", "host", "disk"]
    assert lines[3].split()[:2] == ["target", "resident"]
    assert lines[3].endswith("none")
    assert lines[-1].startswith("KV pool: ")
    for to in ("parked", "released"):
        code, lines, _ = run(capsys, "park", "target", "--to", to, *at)
        assert (code, lines[2].split()[:2]) == (0, ["target", to])
        assert "to disk in" in lines[2]
        code, lines, _ = run(capsys, "status", *at)
        assert (code, lines[0].startswith(f"{server.url}: parked (an administrator")) == (0, True)
        assert lines[3].endswith("parked by an administrator")
        assert lines[3].split()[:4] == ["target", to, "0.0", "MiB"]
    code, lines, _ = run(capsys, "unpark", *at)
    assert (code, lines[2].split()[:2]) == (0, ["target", "resident"])
    assert "to device in" in lines[2]


@pytest.mark.parametrize(
    ("standing", "place", "words"),
    [
        ("ready", "resident", "at 2001-09-09"),
        ("park_waits", "resident", "a park waits for running requests"),
        ("idle", "parked", "idle: the next request brings it back"),
        ("policy", "parked", "away by policy: it comes when needed"),
    ],
)
def test_a_line_says_what_brings_a_model_back(standing: str, place: str, words: str) -> None:
    last = {"direction": "to_host", "bytes": 2**20, "seconds": 0.5, "at": 1_000_000_000 + 12 * 3600}
    sizes = {f"{where}_bytes": 2**20 for where in ("device", "host", "disk")}
    model = {"role": "target", "place": place, "standing": standing, "last_transfer": last, **sizes}
    line = listing({"policy": "swap", "models": [model]})[-1]
    assert words in line
    assert "1.0 MiB to host in 0.50 s at 2001-09-09" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-cap", "-5G"], "--memory-cap must be a size such as '512M' or '4G', got '-5G'"),
        (["--idle-park", "-1"], "--idle-park must be a number of seconds, or 0 to turn it off, got -1.0"),
        (["--device", "cpu", "--memory-cap", "5G"], "--memory-cap '5G' limits the memory of a GPU"),
        (["--device", "cpu", "--offload-layers", "2"], "--offload-layers 2 needs a GPU"),
    ],
)
def test_a_server_with_wrong_settings_never_listens(
    words: list[str], message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(*_: object) -> None:
        raise AssertionError("it listens")

    monkeypatch.setattr(server_run, "listen", listen)
    monkeypatch.setattr(server_run.logs, "configure", lambda *_: None)
    code, lines, error = run(capsys, "serve", *words)
    assert (code, lines) == (2, [])
    assert f"serve: {message}" in error


def test_json_is_the_servers_answer(server: LiveServer, capsys: Capture) -> None:
    for command in ("park", "unpark"):
        code, [line], _ = run(capsys, command, "--json", "--url", server.url)
        assert (code, json.loads(line)["models"][0]["role"]) == (0, "target")
    code, [line], _ = run(capsys, "status", "--json", "--url", server.url)
    health = json.loads(line)
    assert (code, health["status"]) == (0, "ok")
    assert {"policy", "models"} <= health["residency"].keys()


def test_a_busy_server_is_not_parked_if_it_is_not_to_wait(
    server: LiveServer, llm: LLM, capsys: Capture
) -> None:
    headers = {"Authorization": "Bearer secret"}
    with (
        slow_steps(llm, 0.01),
        server.client() as http,
        http.stream("POST", COMPLETE, json=LONG, headers=headers) as reply,
    ):
        lines = reply.iter_lines()  # a reference keeps the stream open
        next(lines)
        for option in (["--no-wait"], ["--timeout", "0.05"]):
            code, _, error = run(capsys, "park", *option, "--url", server.url)
            assert (code, error.startswith("skim park: requests ")) == (1, True)
    eventually(lambda: llm.stats().running == 0)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["park", "draughter"], 2, "MODEL must be target or drafter, got 'draughter'"),
        (["park", "drafter"], 2, "this engine has no drafter to park; name the target"),
        (["unpark", "drafter"], 2, "this engine has no drafter to unpark; name the target"),
        (["park", "--timeout", "0"], 2, "timeout must be greater than 0, got 0"),
        (["park", "--timeout", "nan"], 2, "timeout"),
        (["park", "--admin-key", "wrong"], 1, "give the server's key as SKIM_ADMIN_KEY"),
        (["unpark", "--url", "127.0.0.1:x"], 2, "--url"),
        (["status", "--url", "http://127.0.0.1:9"], 1, "start a server there with `skim serve`"),
    ],
)
def test_errors_name_the_remedy(
    server: LiveServer, capsys: Capture, words: list[str], code: int, message: str
) -> None:
    at = [] if "--url" in words else ["--url", server.url]
    found, lines, error = run(capsys, *words, *at)
    assert (found, lines) == (code, [])
    assert message in error
    assert error.startswith(f"skim {words[0]}: ")


def test_a_server_that_loads_is_shown_and_the_exit_code_says_so(capsys: Capture) -> None:
    with LiveServer(None) as server:
        code, lines, _ = run(capsys, "status", "--url", server.url)
    assert (code, lines) == (1, [f"{server.url}: loading"])


def test_another_engines_server_is_told_apart(capsys: Capture) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None: ...

    with serving(Other) as url:
        code, lines, error = run(capsys, "status", "--url", url)
    assert (code, lines) == (1, [])
    assert "/health is not that of `skim serve`" in error
