"""`litellm`: the provider `openai`, with `api_base`."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from skim import LLM
from tests.live import NAME, LiveServer
from tests.scripted import scripted, tool_call

ASK: list[Any] = [{"role": "user", "content": "What is 5 + 6?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Sum(BaseModel):
    a: int
    b: int


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {"model": f"openai/{NAME}", "api_base": base_url, "api_key": "none", "max_retries": 0}


def test_chat(options: dict[str, Any]) -> None:
    """Chat: `completion`, `acompletion` and `text_completion` answer; usage is passed on."""
    asked = {**options, "messages": ASK, "temperature": 0, "max_tokens": 12}
    reply = litellm.completion(**asked)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens == 12
    later = asyncio.run(litellm.acompletion(**asked))
    assert later.choices[0].message.content == reply.choices[0].message.content
    plain = {**options, "model": f"text-completion-openai/{NAME}", "prompt": "One, two,", "max_tokens": 4}
    assert litellm.text_completion(**plain).choices[0].text


def test_streaming(options: dict[str, Any]) -> None:
    """Streaming: chunks add up to the unstreamed text, and `stream_chunk_builder` rebuilds the reply."""
    asked = {**options, "messages": ASK, "temperature": 0, "max_tokens": 12}
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert built.choices[0].message.content == litellm.completion(**asked).choices[0].message.content
    assert built.usage.completion_tokens == 12


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_over_turns(options: dict[str, Any], llm: LLM, streamed: bool) -> None:
    """Tools over turns: two rounds of calls; histories of litellm's messages, with its own fields."""
    messages = list(ASK)
    replies = [tool_call("add", a=5, b=6), tool_call("add", a=11, b=1), "It is 12."]
    with scripted(llm, *replies) as prompts:
        for _ in replies:
            reply = litellm.completion(**options, messages=messages, tools=[ADD], stream=streamed)
            if streamed:
                reply = litellm.stream_chunk_builder(list(reply), messages=messages)
            message = reply.choices[0].message
            messages.append(message if streamed else message.model_dump())
            for one in message.tool_calls or []:
                result = str(sum(json.loads(one.function.arguments).values()))
                messages.append(
                    {"role": "tool", "tool_call_id": one.id, "name": one.function.name, "content": result}
                )
    assert message.content == "It is 12."
    assert len(messages) == 6
    assert re.findall(r"<tool_response>\s*(\d+)", prompts[2]) == ["11", "12"]
    assert '"a": 11' in prompts[2]


def test_structured_output(options: dict[str, Any], llm: LLM) -> None:
    """Structured output: a pydantic model as `response_format`."""
    with scripted(llm, '{"a": 5, "b": 6}'):
        reply = litellm.completion(**options, messages=ASK, response_format=Sum)
    assert Sum.model_validate_json(reply.choices[0].message.content) == Sum(a=5, b=6)


def test_responses(options: dict[str, Any], llm: LLM) -> None:
    """Responses: `litellm.responses` uses `/v1/responses`."""
    with scripted(llm, "Eleven."):
        reply = litellm.responses(**options, input="What is 5 + 6?")
    assert reply.output[0].content[0].text == "Eleven."


def test_rerank(options: dict[str, Any], server: LiveServer) -> None:
    """Rerank: `litellm.rerank` as for vLLM finds the document that answers the query."""
    documents = ["Whales are mammals.", "The code for the Oslo office is 16979.", "Bread needs flour."]
    reply = litellm.rerank(
        model=f"hosted_vllm/{NAME}",
        api_base=server.url,
        api_key="none",
        query="What is the code for the Oslo office?",
        documents=documents,
        top_n=2,
        return_documents=True,
    )
    first, second = reply.results
    assert first["index"] == 1
    assert first["relevance_score"] > second["relevance_score"]
    assert first["document"]["text"] == documents[1]


def test_embeddings(options: dict[str, Any]) -> None:
    """Embeddings: `litellm.embedding` gives one vector per text."""
    reply = litellm.embedding(**options, input=["The sky is blue.", "Rates rose."])
    assert len({len(one["embedding"]) for one in reply.data}) == 1
    assert [one["index"] for one in reply.data] == [0, 1]


def test_errors(options: dict[str, Any]) -> None:
    """Errors: a refusal is litellm's own `BadRequestError` or `NotFoundError`."""
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        litellm.completion(**options, messages=ASK, max_tokens=-1)
    with pytest.raises(litellm.NotFoundError, match="not served here"):
        litellm.completion(**{**options, "model": "openai/other"}, messages=ASK)
