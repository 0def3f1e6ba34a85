"""Peers read the same prompts in full; a peer that skips part of one fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skim.attention import hook
from skim.bench import ceiling, llama
from skim.bench.ceiling import Ceiling
from skim.bench.inputs import Prompt, random_prompts, several
from skim.bench.llama import LlamaCpp
from skim.bench.peers import Server, Transformers
from skim.cli.main import main
from skim.config import DEFAULT_MODEL, ModelConfig
from skim.measure.report import MeasurementError
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("shape")
    tiny.CONFIGS["llama"]().save_pretrained(directory)
    return build_shape(str(directory), ModelConfig(device="cpu"))


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(tuple(range(1000, 1060)), 8, "sixty words " * 30)


@pytest.mark.usefixtures("default_model_dir")
def test_peers_take_part_in_both_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "measure_ceiling", lambda *_: Ceiling(flops=1e11, bandwidth=1e10))
    peers = ["--peer", "transformers", "--peer", "llama.cpp", "--contexts", "96", "--repeats", "1"]
    common = [*peers, "--json", str(tmp_path / "report.json"), "--kv-memory", "64M", "--modes", "dense"]

    def rows(*options: str) -> dict[str, Any]:
        assert main(["bench", *options, *common]) == 0
        found = json.loads((tmp_path / "report.json").read_text())["rows"]
        return {row["key"]["mode"]: row["figures"] for row in found}

    first = rows("ttft")
    assert list(first) == ["dense", "transformers", "llama.cpp"]
    for figures in first.values():
        assert figures["ttft"]["value"] > 0
        assert figures["first_decode"]["value"] > 0
    assert ["of_peak" in figures for figures in first.values()] == [True, True, False]
    steps = rows("decode", "--batch", "2", "--steps", "4")
    assert list(steps) == ["dense", "transformers", "llama.cpp"]
    floors = [figures["floor"]["value"] for figures in steps.values()]
    assert floors[0] == pytest.approx(floors[1], rel=0.01)
    assert floors[2] == pytest.approx(floors[0], rel=0.1)  # it reads the same bits


# -- transformers


def test_transformers_has_the_module_only_for_its_turn(model: LoadedModel) -> None:
    peer = Transformers(model)
    prompts = random_prompts(model.vocab_size, 0)
    assert peer.first_token(prompts(50, 0)).ttft > 0
    taken = peer.decode(several(prompts, 50, 0, 3), 4)
    assert (len(taken.seconds), taken.contexts) == (4, (52, 52, 52))
    with pytest.raises(MeasurementError, match="window"):
        peer.first_token(prompts(2000, 0))
    assert model.module.config._attn_implementation == hook.NAME


# -- llama.cpp


def reply(**changes: Any) -> dict[str, Any]:
    return {"begun": 0.0, "stamps": [1.0, 1.1], "read": 60, "cached": 0, "written": 2, **changes}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(read=3), "ignored part of the prompt"),
        (reply(read=60, cached=40), "took 40 from a cache"),
        (reply(stamps=[], written=0), "generated 0 of 2 tokens"),
        (reply(stamps=[1.1]), "generated 2 of 2 tokens in 1 chunks"),  # the first one was held back
        (reply(stamps=[1.0, 1.1, 1.2]), "generated 2 of 2 tokens in 3 chunks"),
        (reply(read=None), "ignored part of the prompt"),
    ],
)
def test_llama_cpp_has_to_read_the_whole_prompt(
    monkeypatch: pytest.MonkeyPatch, prompt: Prompt, answer: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(LlamaCpp, "_open", lambda *_: None)
    monkeypatch.setattr(LlamaCpp, "_exchange", lambda *_: {"replies": [answer]})
    with pytest.raises(MeasurementError, match=reason):
        LlamaCpp(DEFAULT_MODEL).first_token(prompt)


def test_only_steps_with_all_rows_count(monkeypatch: pytest.MonkeyPatch, prompt: Prompt) -> None:
    early = reply(stamps=[1.0, 2.0, 3.0, 3.5, 4.0, 4.5], written=6)  # alone until 3.0
    late = reply(stamps=[3.0, 3.5, 4.0, 4.5, 5.0, 5.5], written=6)
    monkeypatch.setattr(LlamaCpp, "_open", lambda *_: None)
    monkeypatch.setattr(LlamaCpp, "_exchange", lambda *_: {"replies": [early, late]})
    taken = LlamaCpp(DEFAULT_MODEL).decode([prompt, prompt], 2)
    assert taken.seconds == (0.5, 0.5, 0.5)


@pytest.mark.usefixtures("default_model_dir")
def test_a_crash_of_llama_cpp_is_reported_and_the_next_prompt_restarts_it(prompt: Prompt) -> None:
    peer = LlamaCpp(DEFAULT_MODEL)
    try:
        assert peer.first_token(prompt).ttft > 0
        assert peer._worker is not None
        peer._worker.kill()
        with pytest.raises(MeasurementError, match=r"llama.cpp crashed \(exit code -9\)"):
            peer.first_token(prompt)
        assert peer.first_token(prompt).ttft > 0
        worker = peer._worker
    finally:
        peer.close()
    assert worker.poll() is not None


def test_llama_cpp_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, prompt: Prompt, tmp_path: Path
) -> None:
    with pytest.raises(MeasurementError, match="needs a GGUF file, got a shape"):
        LlamaCpp(None).first_token(prompt)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and no more")
    with pytest.raises(MeasurementError, match=r"llama.cpp (refused|crashed)"):
        LlamaCpp(str(broken)).first_token(prompt)
    monkeypatch.setattr(llama, "find_spec", lambda _: None)
    with pytest.raises(MeasurementError, match="pip install"):
        LlamaCpp(DEFAULT_MODEL).first_token(prompt)


# -- a server


class Handler(BaseHTTPRequestHandler):
    """OpenAI's API, with the usage and the reply that a test sets."""

    usage: dict[str, Any]
    words: list[str]

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "some"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunks = [{"choices": [{"text": word, "finish_reason": None}]} for word in self.words]
        end = {"choices": [{"text": "", "finish_reason": "length"}], "usage": self.usage}
        self._answer("".join(f"data: {json.dumps(one)}\n\n" for one in (*chunks, end)) + "data: [DONE]\n\n")

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.usage, Handler.words = {"prompt_tokens": 61, "completion_tokens": 2}, ["a", " b"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_server_is_timed_at_the_client(server: str, prompt: Prompt) -> None:
    found = Server(server).first_token(prompt)
    assert found.ttft > 0
    assert found.prompt_tokens == 61


@pytest.mark.parametrize(
    ("usage", "words", "reason"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2}, ["a", " b"], "ignored part of the prompt"),
        ({"prompt_tokens": 61, "completion_tokens": 0}, [], "empty reply"),
        (
            {"prompt_tokens": 61, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 48}},
            ["a", " b"],
            "48 tokens of the prompt cached",
        ),
    ],
)
def test_a_server_that_did_not_read_the_prompt_fails(
    server: str, prompt: Prompt, usage: dict[str, Any], words: list[str], reason: str
) -> None:
    Handler.usage, Handler.words = usage, words
    with pytest.raises(MeasurementError, match=reason):
        Server(server).first_token(prompt)


def test_an_unreachable_server_is_reported(prompt: Prompt) -> None:
    with pytest.raises(MeasurementError, match="cannot reach"):
        Server("http://127.0.0.1:9").first_token(prompt)
