"""`llm`: the command and library, with models of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llm as llm_client
import pytest
import yaml
from click.testing import CliRunner
from llm.cli import cli

from skim import LLM
from tests.live import NAME
from tests.scripted import scripted, tool_call

ASK = "What is 5 + 6?"
SCHEMA = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}


@pytest.fixture(params=["chat", "responses"])
def model_id(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """A model that `llm` reads from its file."""
    entry = {
        "model_id": "local",
        "model_name": NAME,
        "api_base": base_url,
        "supports_tools": True,
        "supports_schema": True,
        "responses": request.param == "responses",
    }
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry]))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return "local"


def run(*arguments: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_prompt(model_id: str) -> None:
    """Prompt: the command answers, streamed and not, with a system prompt."""
    asked = (
        "prompt",
        "-m",
        model_id,
        "-s",
        "Be brief.",
        "-o",
        "max_tokens",
        "12",
        "-o",
        "temperature",
        "0",
        ASK,
    )
    streamed = run(*asked)
    assert streamed.strip()
    assert run(*asked, "--no-stream") == streamed


def test_chat(model_id: str, llm: LLM) -> None:
    """Chat: a conversation sends its earlier turns."""
    with scripted(llm, "Eleven.", "Yes.") as prompts:
        talk = llm_client.get_model(model_id).conversation()
        assert talk.prompt(ASK).text() == "Eleven."
        assert talk.prompt("Sure?").text() == "Yes."
    assert "Eleven." in prompts[1]


def test_continue(model_id: str, llm: LLM) -> None:
    """Chat: `llm -c` continues the logged conversation."""
    with scripted(llm, "Eleven.", "Yes.") as prompts:
        run("prompt", "-m", model_id, ASK)
        assert run("prompt", "-c", "Sure?").strip() == "Yes."
    assert "Eleven." in prompts[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(model_id: str, llm: LLM, streamed: bool) -> None:
    """Tools: a chain calls a Python function, sends its result, and answers; streamed and not."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with scripted(llm, tool_call("add", a=5, b=6), "It is 11.") as prompts:
        chain = llm_client.get_model(model_id).chain(ASK, tools=[add], stream=streamed)
        assert chain.text() == "It is 11."
    assert "11" in prompts[1].rpartition("</tool_call>")[2]


def test_schema(model_id: str, llm: LLM) -> None:
    """Schema: `--schema` prints JSON that follows it."""
    with scripted(llm, '{"total": 11}'):
        assert json.loads(run("prompt", "-m", model_id, "--schema", json.dumps(SCHEMA), ASK)) == {"total": 11}


def test_schema_of_the_model(model_id: str) -> None:
    """Schema: the grammar makes the default model itself follow it."""
    found = json.loads(run("prompt", "-m", model_id, "--schema", json.dumps(SCHEMA), ASK))
    assert isinstance(found["total"], int)
