"""`skim checkpoint` and `/admin/checkpoints`: prefixes with names, in a directory and on a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim import LLM, SamplingParams
from skim.checkpoints import beginning, save
from skim.cli.ask import messages_about
from skim.cli.documents import read_sources
from skim.cli.main import main
from skim.engine import keeper as keepers
from skim.errors import RequestError
from tests import paths, tiny
from tests.live import LiveServer

ADMIN = {"Authorization": "Bearer root"}
TEXT = paths.BOOK[2000:2800].encode("ascii", "replace").decode()
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS = {"kv_memory": "16M", "max_model_len": 2000, "device": "cpu"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "TOKENS", 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    config = path / "config.json"
    config.write_text(
        re.sub(r'"max_position_embeddings": \d+', '"max_position_embeddings": 4096', config.read_text())
    )
    return path


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def llm(model: Path, tmp_path: Path) -> Iterator[LLM]:
    with LLM(model, progress=False, checkpoint_dir=str(tmp_path / "kept"), **SETTINGS) as llm:
        yield llm


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


# -- the beginning of prompts


@pytest.mark.parametrize("question", ["What is it?", "1 + 1", "\n\nWhy?", " and so on", "é"])
def test_a_beginning_is_a_prefix_of_every_prompt_with_the_document(
    llm: LLM, document: Path, question: str
) -> None:
    sources = read_sources([str(document)], None)
    asked = llm.encode_chat(messages_about(sources, question), skimmed=False).tokens
    shared = beginning(llm, messages=[{"role": "user", "content": [{"type": "text", "text": TEXT + "\n"}]}])
    assert asked[: len(shared)] == shared
    assert len(shared) > 0.9 * len(llm.encode(TEXT))
    for one in (TEXT + question, TEXT + "\n" + question):
        plain = llm.encode(one)
        found = beginning(llm, prompt=TEXT)
        assert plain[: len(found)] == found


def test_a_request_restores_what_was_saved_under_a_name_and_a_restart_finds_it(
    model: Path, tmp_path: Path, llm: LLM
) -> None:
    messages = [{"role": "system", "content": TEXT}]
    saved = save(llm, "rules", messages=messages)
    assert saved.tokens >= len(beginning(llm, messages=messages)) - 16
    llm.close()
    question = {"role": "user", "content": "What?"}
    with LLM(model, progress=False, checkpoint_dir=str(tmp_path / "kept"), **SETTINGS) as again:
        [output] = again.chat([*messages, question], GREEDY, use_tqdm=False)
        assert output.metrics.restored_tokens >= saved.tokens
        again.engine.keeper.directory.remove("rules")
    with LLM(model, progress=False, **SETTINGS) as plain:
        assert plain.chat([*messages, question], GREEDY, use_tqdm=False)[0].outputs == output.outputs
        with pytest.raises(RequestError, match="start with checkpoint_dir"):
            save(plain, "rules", messages=messages)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "exactly one of"),
        ({}, "exactly one of"),
        ({"messages": []}, "messages is empty"),
        ({"prompt": "too short"}, "at least 64 tokens"),
    ],
)
def test_what_cannot_be_saved_is_refused(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        save(llm, "x", **given)
    with pytest.raises(RequestError, match="a checkpoint's name has"):
        save(llm, "../x", prompt=TEXT)


# -- the command


def test_the_command_saves_lists_and_removes_in_a_directory(
    model: Path, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--checkpoint-dir", tmp_path / "kept"]
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    save_it = ["checkpoint", "save", "book", document, "--model", model, *kept, *settings]
    status, out, err = run(*save_it, capsys=capsys)
    assert status == 0, err
    assert re.fullmatch(r"book: \d+ tokens of \S+, [\d.]+ \w+, saved 20\d\d-.*\n", out)
    tokens = int(out.split()[1])
    assert run("checkpoint", "list", *kept, capsys=capsys)[:2] == (0, out)
    ask = ["ask", document, "-q", "What?", "--json", "--max-tokens", "2", "--sparse-prefill", "off"]
    status, reply, err = run(*ask, "--model", model, *kept, *settings, capsys=capsys)
    assert status == 0, err
    assert (
        f'"cached_tokens": {tokens}' in reply
        or int(re.findall(r'"cached_tokens": (\d+)', reply)[0]) >= tokens
    )
    ask.remove("--json")
    status, _, err = run(*ask, "--model", model, *kept, *settings, capsys=capsys)
    assert status == 0, err
    restored = re.findall(r" prompt tokens, all read, (\d+) from checkpoints, first token after ", err)
    assert [int(count) >= tokens for count in restored] == [True]
    assert run("checkpoint", "rm", "book", *kept, capsys=capsys)[:2] == (0, f"removed {out}")
    none = (0, "", f"no named prefixes in {tmp_path / 'kept'}\n")
    assert run("checkpoint", "list", *kept, capsys=capsys) == none
    _, _, err = run("checkpoint", "list", "--checkpoint-dir", tmp_path / "ketp", capsys=capsys)
    assert err == f"no named prefixes in {tmp_path / 'ketp'}: there is no such directory\n"
    status, _, err = run("checkpoint", "rm", "book", *kept, capsys=capsys)
    assert (status, "there is no checkpoint 'book'" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "--checkpoint-dir is not set; set it, or give --url"),
        (["rm", "book"], "--checkpoint-dir is not set; set it, or give --url"),
        (["load", "book"], "load is for a running server: give its address with --url; elsewhere"),
        (["load", "book", "--checkpoint-dir", "a"], "a stored prefix returns by itself"),
        (
            ["load", "book", "--checkpoint-dir", "a", "--url", "http://127.0.0.1:1"],
            "--checkpoint-dir has no effect with --url",
        ),
        (
            ["list", "--checkpoint-dir", "a", "--url", "http://127.0.0.1:1"],
            "--checkpoint-dir has no effect with",
        ),
        (
            ["rm", "book", "--checkpoint-size", "1G", "--url", "http://127.0.0.1:1"],
            "--checkpoint-size has no eff",
        ),
        (["load", "../book", "--url", "http://127.0.0.1:1"], "a letter or digit, got '../book'"),
        (["rm", ".book", "--checkpoint-dir", "a"], "begins with a letter or digit"),
        (["list", "--admin-key", "x"], "--admin-key: it is the key of the server at --url"),
        (["save", "a", "nowhere.txt"], "nowhere.txt"),
        (["save", "a", "DOC", "--url", "http://127.0.0.1:1", "--kv-memory", "1G"], "--kv-memory has no"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str], message: str, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(document) if one == "DOC" else one for one in arguments]
    status, _, err = run("checkpoint", *given, capsys=capsys)
    assert status == 2
    assert message in err


# -- a server


def test_a_server_saves_lists_loads_and_removes(
    llm: LLM, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer(llm, admin_key="root") as server, server.client() as http:
        remote = ["--url", server.url, "--admin-key", "root"]
        status, out, err = run("checkpoint", "save", "book", document, *remote, capsys=capsys)
        assert status == 0, err
        assert run("checkpoint", "list", *remote, capsys=capsys)[:2] == (0, out)
        tokens = int(out.split()[1])
        http.post("/admin/reset_prefix_cache", headers=ADMIN)
        status, shown, err = run("checkpoint", "load", "book", *remote, capsys=capsys)
        assert (status, shown) == (0, f"book: {tokens} tokens are cached\n"), err
        reply = http.post(
            "/v1/chat/completions",
            json={"messages": messages_about(read_sources([str(document)], None), "What?"), "max_tokens": 2},
        ).json()
        assert reply["skim"]["cached_tokens"] >= tokens
        assert reply["skim"]["restored_tokens"] == 0
        health = http.get("/health").json()["checkpoints"]
        assert health["files"] > 0
        assert health == http.get("/admin/stats", headers=ADMIN).json()["checkpoints"]
        metrics = http.get("/metrics").text
        found = re.search(r"^skim:checkpoint_restored_tokens_total\{.*\} ([\d.e+]+)$", metrics, re.M)
        assert found is not None
        assert float(found[1]) == health["restored_tokens"] == tokens
        status, shown, _ = run("checkpoint", "rm", "book", *remote, capsys=capsys)
        assert (status, shown) == (0, f"removed {out}")
        none = (0, "", f"no named prefixes in {server.url}\n")
        assert run("checkpoint", "list", *remote, capsys=capsys) == none
        refused(http.post("/admin/checkpoints/book/load", headers=ADMIN), 400, "no checkpoint 'book'")
        refused(http.delete("/admin/checkpoints/book", headers=ADMIN), 400, "no checkpoint 'book'")
        refused(http.post("/admin/checkpoints", json={"name": "a"}, headers=ADMIN), 400, "exactly one of")
        refused(http.get("/admin/checkpoints"), 401, "admin key")
        status, _, err = run("checkpoint", "list", "--url", server.url, capsys=capsys)
        assert status == 1
        assert "(give the server's key as SKIM_ADMIN_KEY, admin_key in the file, or --admin-key)" in err
        status, _, err = run("checkpoint", "load", "book", *remote, capsys=capsys)
        assert status == 2
        assert "there is no checkpoint 'book'" in err
        assert "`skim checkpoint list` lists them" in err
    with LiveServer(llm) as server:
        status, _, err = run("checkpoint", "list", "--url", server.url, capsys=capsys)
        assert (status, err.strip().endswith("; start the server with --admin-key")) == (1, True)


def test_a_text_without_a_common_beginning_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompts that begin with '' have no token in common") as refused:
        beginning(llm, prompt="")
    assert refused.value.fields == ("prompt",)


def test_a_server_without_a_directory_says_so(model: Path) -> None:
    with (
        LLM(model, progress=False, **SETTINGS) as llm,
        LiveServer(llm, admin_key="root") as server,
        server.client() as http,
    ):
        refused(http.get("/admin/checkpoints", headers=ADMIN), 400, "start with checkpoint_dir")
        assert http.get("/health").json()["checkpoints"] is None


def refused(reply: httpx.Response, status: int, message: str) -> None:
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]
