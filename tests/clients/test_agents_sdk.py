"""`openai-agents`: the OpenAI Agents SDK, on the Responses API and on chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
)
from pydantic import BaseModel

from skim import LLM
from tests.live import NAME
from tests.scripted import scripted, tool_call

MODELS = [OpenAIResponsesModel, OpenAIChatCompletionsModel]
ASK = "What is 5 + 6?"


class Sum(BaseModel):
    total: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(params=MODELS, ids=["responses", "chat"])
def model(base_url: str, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return request.param(model=NAME, openai_client=client)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loop(model: Any, llm: LLM, streamed: bool) -> None:
    """Tool loop: an agent calls a function, sends its result, and answers; also streamed."""
    agent = Agent(name="Adder", instructions="Use the tool.", model=model, tools=[add])

    async def run() -> Any:
        if not streamed:
            return await Runner.run(agent, ASK)
        result = Runner.run_streamed(agent, ASK)
        kinds = [event.type async for event in result.stream_events()]
        assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
        return result

    with scripted(llm, tool_call("add", a=5, b=6), "It is 11.") as prompts:
        result = asyncio.run(run())
    assert result.final_output == "It is 11."
    assert "11" in prompts[1].rpartition("</tool_call>")[2]


def test_output_type(model: Any, llm: LLM) -> None:
    """Structured output: `output_type` is a pydantic model."""
    agent = Agent(name="Adder", model=model, output_type=Sum)
    with scripted(llm, '{"total": 11}'):
        result = asyncio.run(Runner.run(agent, ASK))
    assert result.final_output == Sum(total=11)


def test_handoff(model: Any, llm: LLM) -> None:
    """Handoff: one agent passes the conversation on to another."""
    other = Agent(name="Poet", instructions="Answer in verse.", model=model)
    agent = Agent(name="Clerk", model=model, handoffs=[handoff(other)])
    with scripted(llm, tool_call("transfer_to_poet"), "Five and six, eleven sticks.") as prompts:
        result = asyncio.run(Runner.run(agent, ASK))
    assert (result.last_agent.name, result.final_output) == ("Poet", "Five and six, eleven sticks.")
    assert "Answer in verse." in prompts[1]
