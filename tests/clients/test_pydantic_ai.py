"""`pydantic-ai`: agents on chat completions and on the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from skim import LLM
from tests.live import NAME
from tests.scripted import scripted, tool_call

ASK = "What is 5 + 6?"


class Sum(BaseModel):
    total: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(base_url: str, request: pytest.FixtureRequest) -> Any:
    return request.param(NAME, provider=OpenAIProvider(base_url=base_url, api_key="none"))


def test_tool_loop(model: Any, llm: LLM) -> None:
    """Tool loop: an agent calls a function, sends its result, and answers."""
    agent = Agent(model, instructions="Use the tool.", tools=[add])
    with scripted(llm, tool_call("add", a=5, b=6), "It is 11.") as prompts:
        result = agent.run_sync(ASK)
    assert result.output == "It is 11."
    assert "11" in prompts[1].rpartition("</tool_call>")[2]


def test_stream(model: Any, llm: LLM) -> None:
    """Stream: `run_stream` gives growing text after a tool call."""
    agent = Agent(model, tools=[add])

    async def run() -> list[str]:
        async with agent.run_stream(ASK) as result:
            return [text async for text in result.stream_text(debounce_by=None)]

    with scripted(llm, tool_call("add", a=5, b=6), "It is 11, as it was."):
        seen = asyncio.run(run())
    assert seen[-1] == "It is 11, as it was."
    assert len(seen) > 3


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_structured_output(model: Any, llm: LLM, kind: Any) -> None:
    """Structured output: by a forced call (`ToolOutput`) and by schema (`NativeOutput`)."""
    agent: Any = Agent(model, output_type=kind(Sum))
    with scripted(llm, tool_call("final_result", total=11) if kind is ToolOutput else '{"total": 11}'):
        assert agent.run_sync(ASK).output == Sum(total=11)


def test_history(model: Any, llm: LLM) -> None:
    """History: `message_history` of an earlier run, with its calls, is accepted."""
    agent = Agent(model, tools=[add])
    with scripted(llm, tool_call("add", a=5, b=6), "It is 11.", "Yes.") as prompts:
        first = agent.run_sync(ASK)
        second = agent.run_sync("Are you sure?", message_history=first.all_messages())
    assert second.output == "Yes."
    assert "It is 11." in prompts[2]
