"""Sampling defaults from a model's `generation_config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from skim import LLM
from skim.config import EngineConfig
from skim.engine.handle import RequestHandle
from skim.models.generation import sampling_defaults
from skim.models.load import load
from skim.prefill.request import Request
from tests import tiny
from tests.live import LiveServer

GIVEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 17, "min_p": 0.05, "repetition_penalty": 1.25}


def write(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    return write(directory, **GIVEN, do_sample=True, max_length=20, eos_token_id=[257, 65])


def test_known_fields_are_read_and_others_are_not(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    write(tmp_path, **GIVEN, do_sample=True, typical_p=0.5, max_new_tokens=9)
    assert sampling_defaults(tmp_path) == GIVEN
    assert sampling_defaults(write(tmp_path, temperature=None)) == {}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("value", ["warm", -3, True, [1]])
def test_a_value_that_cannot_be_used_is_logged_and_left_out(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = "top_p" if name != "top_p" else "min_p"
    write(tmp_path, **{name: value, other: 0.5})
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(tmp_path) == {other: 0.5}
    assert name in caplog.text


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_damaged_file_sets_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(("setting", "expected"), [("auto", GIVEN), ("none", {})])
def test_the_setting_decides_and_end_tokens_stay(path: Path, setting: str, expected: dict[str, Any]) -> None:
    model = load(path, EngineConfig.of(model=str(path), generation_config=setting).model)
    assert model.sampling_defaults == expected
    assert model.eos_token_ids == {257, 65}


def test_requests_override_the_defaults(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with LLM(path, progress=False, kv_memory="8M") as llm, LiveServer(llm) as server:
        submit = llm.engine.submit

        def spy(request: Request, emit: Any = None) -> RequestHandle:
            seen.append({name: getattr(request.params, name) for name in GIVEN})
            return submit(request, emit)

        monkeypatch.setattr(llm.engine, "submit", spy)
        llm.generate("a", use_tqdm=False)
        with server.client() as http:
            for route, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                for fields in ({}, {"temperature": 0, "top_k": -1}):
                    reply = http.post(route, json={"max_tokens": 1, **body, **fields})
                    assert reply.status_code == 200, reply.text
    changed = {**GIVEN, "temperature": 0, "top_k": -1}
    assert seen == [GIVEN, GIVEN, changed, GIVEN, changed]
