"""A live server on the default model for the clients of other projects.

Where 135M parameters cannot call tools, `scripted` fixes the replies. Everything else is the model's own.
Telemetry and tracing of the clients are switched off before they are imported. Only loopback is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
from tests.live import LiveServer

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Other runs neither need the clients nor wait for their imports."""
    return None if config.getoption("markexpr") == "clients" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def llm(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(default_model_dir, progress=False, kv_memory="384M") as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: LiveServer) -> str:
    return f"{server.url}/v1"
