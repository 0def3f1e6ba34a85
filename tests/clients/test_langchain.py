"""`langchain-openai`: `ChatOpenAI` and the agents of langchain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from skim import LLM
from tests.live import NAME
from tests.scripted import scripted, tool_call

ASK = "What is 5 + 6?"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sum(BaseModel):
    """A sum."""

    a: int
    b: int


@pytest.fixture
def model(base_url: str) -> Any:
    return ChatOpenAI(
        model=NAME,
        base_url=base_url,
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=64,
        stream_usage=True,
    )


def test_chat(model: Any) -> None:
    """Chat: `invoke` and `batch` answer, with usage; `ainvoke` gives the same text."""
    reply = model.invoke(ASK)
    assert reply.content
    assert reply.usage_metadata["output_tokens"] > 0
    assert [one.content for one in model.batch([ASK, ASK])] == [reply.content] * 2
    assert asyncio.run(model.ainvoke(ASK)).content == reply.content


def test_streaming(model: Any) -> None:
    """Streaming: chunks add up to the text of `invoke`, and with `stream_usage` the last has the usage."""
    chunks = list(model.stream(ASK))
    whole = sum(chunks[1:], chunks[0])
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    assert whole.content == model.invoke(ASK).content
    assert whole.usage_metadata["output_tokens"] > 3


@pytest.mark.parametrize("streamed", [False, True])
def test_agents(model: Any, llm: LLM, streamed: bool) -> None:
    """Agents: `create_agent` calls a tool, sends its result, and answers; also when it streams tokens."""
    agent, ask = create_agent(model, [add]), {"messages": [{"role": "user", "content": ASK}]}
    with scripted(llm, "Let me add.\n" + tool_call("add", a=5, b=6), "It is 11.") as prompts:
        if streamed:
            pieces = [
                chunk.content
                for chunk, _ in agent.stream(ask, stream_mode="messages")
                if isinstance(chunk, AIMessageChunk)
            ]
            assert "".join(pieces) == "Let me add.It is 11."
            assert len(pieces) > 4
        else:
            messages = agent.invoke(ask)["messages"]
            assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
            assert messages[1].tool_calls[0]["args"] == {"a": 5, "b": 6}
            assert (messages[2].content, messages[3].content) == ("11", "It is 11.")
    assert "11" in prompts[1].rpartition("</tool_call>")[2]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model: Any, llm: LLM, method: str) -> None:
    """Structured output: `with_structured_output` by schema, by a forced call and by JSON mode."""
    asking = model.with_structured_output(Sum, method=method)
    reply = tool_call("Sum", a=5, b=6) if method == "function_calling" else '{"a": 5, "b": 6}'
    with scripted(llm, reply):
        assert asking.invoke(f"{ASK} Answer as JSON.") == Sum(a=5, b=6)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_the_model(model: Any, method: str) -> None:
    """Structured output: grammars make the default model itself follow the schema."""
    assert isinstance(model.with_structured_output(Sum, method=method).invoke(ASK), Sum)


def test_structured_agents(model: Any, llm: LLM) -> None:
    """Agents: one with tools and a `response_format` ends with an object."""
    agent = create_agent(model, [add], response_format=Sum)
    with scripted(llm, tool_call("add", a=5, b=6), tool_call("Sum", a=5, b=6)):
        result = agent.invoke({"messages": [{"role": "user", "content": ASK}]})
    assert result["structured_response"] == Sum(a=5, b=6)


def test_embeddings(base_url: str) -> None:
    """Embeddings: `OpenAIEmbeddings` embeds documents and queries, as texts."""
    embed = OpenAIEmbeddings(
        model=NAME, base_url=base_url, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    [document] = embed.embed_documents(["The sky is blue."])
    assert embed.embed_query("The sky is blue.") == pytest.approx(document, abs=1e-3)
