"""The Responses API by the official `openai` client, unmodified, with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from skim import LLM
from skim.errors import EngineError
from tests import tiny
from tests.live import NAME, LiveServer
from tests.scripted import scripted

pytestmark = pytest.mark.clients

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASK = "How is the weather in Oslo?"


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama", window=8192)
    with LLM(path, progress=False, kv_memory="16M") as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with (
        LiveServer(llm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_response_is_stored_continued_and_deleted(client: openai.OpenAI, llm: LLM) -> None:
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
    with scripted(llm, "Sunny, with some wind."), client.responses.stream(model=NAME, input=ASK) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(texts) > 3
    assert "".join(texts) == final.output_text == "Sunny, with some wind."
    assert final.usage is not None
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(client: openai.OpenAI, llm: LLM, streamed: bool) -> None:
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
    with scripted(llm, '{"city": "Oslo", "degrees": 12}'):
        response = client.responses.parse(model=NAME, input=ASK, text_format=Report)
    assert response.output_parsed == Report(city="Oslo", degrees=12)


def test_tokens_are_counted(client: openai.OpenAI, llm: LLM) -> None:
    count = client.responses.input_tokens.count(model=NAME, input=ASK)
    with scripted(llm, "Sunny."):
        response = client.responses.create(model=NAME, input=ASK)
    assert response.usage is not None
    assert count.input_tokens == response.usage.input_tokens


def test_a_late_failure_reaches_the_client(client: openai.OpenAI, llm: LLM) -> None:
    with scripted(llm, EngineError("the forward failed")):
        events = list(client.responses.create(model=NAME, input=ASK, stream=True))
    assert events[-1].type == "error"
    assert events[-1].message == "the forward failed"
