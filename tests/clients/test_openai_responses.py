"""`openai`: the Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from skim import LLM
from skim.errors import EngineError
from tests.live import NAME
from tests.scripted import scripted, tool_call

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = tool_call("get_weather", city="Oslo")
ASK = "How is the weather in Oslo?"


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_stored_continued_and_deleted(client: openai.OpenAI, llm: LLM) -> None:
    """Responses: a response is stored, continued by `previous_response_id`, listed and deleted."""
    with scripted(llm, "Sunny.", "Twelve degrees.") as prompts:
        first = client.responses.create(model=NAME, input=ASK, instructions="Be brief.")
        second = client.responses.create(model=NAME, input="How warm?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("Sunny.", "Twelve degrees.")
    assert "Sunny." in prompts[1]
    assert client.responses.retrieve(first.id).output_text == "Sunny."
    assert len(client.responses.input_items.list(second.id).data) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is stored"):
        client.responses.create(model=NAME, input="Hm?", previous_response_id=first.id)


def test_a_stream(client: openai.OpenAI, llm: LLM) -> None:
    """Responses: `responses.stream` gives the text piece by piece, and the final response."""
    with scripted(llm, "Sunny, with some wind."), client.responses.stream(model=NAME, input=ASK) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(texts) > 3
    assert "".join(texts) == final.output_text == "Sunny, with some wind."
    assert final.usage is not None
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(client: openai.OpenAI, llm: LLM, streamed: bool) -> None:
    """Responses: a tool loop with items made by `model_dump()`, unstreamed and streamed."""
    items: list[Any] = [{"role": "user", "content": ASK}]
    fields: dict[str, Any] = {"model": NAME, "tools": [WEATHER]}
    with scripted(llm, CALL, "It is sunny.") as prompts:
        for _ in range(2):
            if streamed:
                with client.responses.stream(input=items, **fields) as stream:
                    response: Any = stream.get_final_response()
            else:
                response = client.responses.create(input=items, **fields)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            assert json.loads(calls[0].arguments) == {"city": "Oslo"}
            items += [item.model_dump() for item in response.output]
            items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny, 12"})
    assert response.output_text == "It is sunny."
    assert "sunny, 12" in prompts[1]


def test_structured_output_is_parsed(client: openai.OpenAI, llm: LLM) -> None:
    """Responses: `responses.parse` gives a pydantic object."""
    with scripted(llm, '{"city": "Oslo", "degrees": 12}'):
        response = client.responses.parse(model=NAME, input=ASK, text_format=Report)
    assert response.output_parsed == Report(city="Oslo", degrees=12)


def test_tokens_are_counted(client: openai.OpenAI, llm: LLM) -> None:
    """Responses: `input_tokens.count` equals the usage of the same response."""
    count = client.responses.input_tokens.count(model=NAME, input=ASK)
    with scripted(llm, "Sunny."):
        response = client.responses.create(model=NAME, input=ASK)
    assert response.usage is not None
    assert count.input_tokens == response.usage.input_tokens


def test_a_late_failure_reaches_the_client(client: openai.OpenAI, llm: LLM) -> None:
    """Responses: a failure in the middle of a stream is an `error` event."""
    with scripted(llm, EngineError("the forward failed")):
        events = list(client.responses.create(model=NAME, input=ASK, stream=True))
    assert events[-1].type == "error"
    assert events[-1].message == "the forward failed"
