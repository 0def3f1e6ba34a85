"""A live server for the clients of other projects, on the default model, with replies that a test may fix.

Telemetry and tracing of the clients are switched off before they are imported. Only loopback is used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(
    {
        "ANONYMIZED_TELEMETRY": "False",
        "DO_NOT_TRACK": "1",
        "LANGCHAIN_TRACING_V2": "false",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_TELEMETRY": "False",
        "NO_PROXY": "127.0.0.1,localhost",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
)

import pytest

from skim import LLM
from skim.engine.engine import RequestHandle
from skim.engine.sequence import Event
from skim.prefill.request import Request
from skim.sampling.grammar import Grammar
from tests.live import LiveServer

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Other runs neither need the clients nor wait for their imports."""
    return None if config.getoption("markexpr") == "clients" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


class Script:
    """Fixes the next replies of a model that is too small to call tools by itself.

    A reply is fixed by a grammar that allows only its text, so the engine, its sampler and the server work as
    always. Without a fixed reply the model answers freely.
    """

    def __init__(self, llm: LLM) -> None:
        self._texts: list[str] = []
        self._lock = threading.Lock()
        self._submit = llm.engine.submit
        self.prompts: list[str] = []
        """The rendered prompts, in order."""
        self._decode = llm.tokenizer.decode

    def replies(self, *texts: str) -> None:
        with self._lock:
            self._texts.extend(texts)

    @property
    def used(self) -> bool:
        """True if every reply was given."""
        return not self._texts

    def submit(self, request: Request, emit: Callable[[Event], None] | None = None) -> RequestHandle:
        with self._lock:
            text = self._texts.pop(0) if self._texts else None
            self.prompts.append(self._decode(list(request.prompt_token_ids)))
        if text is not None:
            params = replace(request.params, grammar=Grammar.lark(f"start: {literal(text)}"))
            request = replace(request, params=params)
        return self._submit(request, emit)


def literal(text: str) -> str:
    """A text as a terminal of a Lark grammar."""
    escaped = "".join(f"\\x{ord(one):02x}" if one in '"\\\n\r\t' else one for one in text)
    return f'"{escaped}"'


@pytest.fixture(scope="session")
def llm(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(default_model_dir, progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.fixture
def script(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script(llm)
    monkeypatch.setattr(llm.engine, "submit", script.submit)
    yield script
    assert script.used, "the client asked for fewer replies than the test expects"


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: LiveServer) -> str:
    return f"{server.url}/v1"


def hermes(name: str, arguments: Any) -> str:
    """A tool call in the default model's format."""
    from skim.server.tools import HERMES

    return HERMES.call(name, arguments)
