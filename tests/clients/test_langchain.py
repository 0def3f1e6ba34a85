"""langchain-openai: streaming, agents, structured output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Script, hermes
from tests.live import NAME

langchain_openai = pytest.importorskip("langchain_openai")

from langchain.agents import create_agent  # noqa: E402
from langchain_core.tools import tool  # noqa: E402


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def model(base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model=NAME, base_url=base_url, api_key="none", max_retries=0, temperature=0, max_tokens=64
    )


def test_streaming(model: Any, script: Script) -> None:
    script.replies("Five plus six is eleven.")
    pieces = [chunk.content for chunk in model.stream("What is 5 + 6?")]
    assert "".join(pieces) == "Five plus six is eleven."
    assert len([piece for piece in pieces if piece]) > 3


def test_agent_calls_a_tool_and_answers(model: Any, script: Script) -> None:
    script.replies(hermes("add", {"a": 5, "b": 6}), "It is 11.")
    agent = create_agent(model, [add])
    messages = agent.invoke({"messages": [{"role": "user", "content": "What is 5 + 6?"}]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"] == {"a": 5, "b": 6}
    assert (messages[2].content, messages[3].content) == ("11", "It is 11.")
    assert "11" in script.prompts[1]
