"""`openai`: chat completions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from skim import LLM
from skim.errors import EngineError
from tests.live import NAME, LiveServer
from tests.scripted import scripted, tool_call

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
ANSWER = "It is sunny."


class Report(BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    """Chat: a reply with usage, `n` choices and logprobs; `models.list` names the model."""
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "messages": ASK, "max_tokens": 8}
    reply = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2, temperature=0)
    first, second = reply.choices
    assert first.message.content
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert len(first.logprobs.content or []) == 8
    assert first.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_chat_turns(client: openai.OpenAI, llm: LLM) -> None:
    """Chat: a history of `message` objects and of `message.model_dump()` is accepted."""
    messages = list(ASK)
    with scripted(llm, "One.", "Two.", "Three.") as prompts:
        for dump in (False, True, False):
            message = client.chat.completions.create(model=NAME, messages=messages).choices[0].message
            messages += [message.model_dump() if dump else message, {"role": "user", "content": "Next?"}]
    assert message.content == "Three."
    assert "One." in prompts[2]
    assert "Two." in prompts[2]


def test_stream(client: openai.OpenAI) -> None:
    """Stream: deltas add up to the unstreamed text; `include_usage` adds a last chunk with the usage."""
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "max_tokens": 12, "temperature": 0}
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == client.chat.completions.create(**asked).choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_async_stream(base_url: str, llm: LLM) -> None:
    """Stream: `AsyncOpenAI` with `chat.completions.stream` gives events and the final completion."""

    async def run() -> tuple[str, str | None]:
        async with (
            openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client,
            client.chat.completions.stream(model=NAME, messages=ASK) as stream,
        ):
            texts = [event.delta async for event in stream if event.type == "content.delta"]
            return "".join(texts), (await stream.get_final_completion()).choices[0].message.content

    with scripted(llm, ANSWER):
        assert asyncio.run(run()) == (ANSWER, ANSWER)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dump", [{}, {"exclude_none": True}], ids=["all", "set"])
def test_tool_loop(client: openai.OpenAI, llm: LLM, streamed: bool, dump: dict[str, Any]) -> None:
    """Tool loop: two calls at once, history made with `message.model_dump()`; unstreamed and streamed."""
    messages = list(ASK)
    call = "Let me look.\n" + tool_call("get_weather", city="Oslo") + tool_call("get_weather", city="Rome")
    fields: dict[str, Any] = {"model": NAME, "tools": [WEATHER]}
    with scripted(llm, call, ANSWER) as prompts:
        for _ in range(2):
            if streamed:
                with client.chat.completions.stream(messages=messages, **fields) as stream:
                    choice: Any = stream.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(messages=messages, **fields).choices[0]
            messages.append(choice.message.model_dump(**dump))
            for one in choice.message.tool_calls or []:
                city = json.loads(one.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": one.id, "content": f"{city} has sun"})
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert "Let me look." in prompts[1]
    assert prompts[1].index("Oslo has sun") < prompts[1].index("Rome has sun")


def test_functions(client: openai.OpenAI, llm: LLM) -> None:
    """Tool loop: the older `functions` and `function_call`, with a `function` message as the result."""
    messages = list(ASK)
    with scripted(llm, tool_call("get_weather", city="Oslo"), ANSWER) as prompts:
        for _ in range(2):
            reply = client.chat.completions.create(
                model=NAME, messages=messages, functions=[WEATHER["function"]], function_call="auto"
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if message.function_call is not None:
                assert reply.choices[0].finish_reason == "function_call"
                assert json.loads(message.function_call.arguments) == {"city": "Oslo"}
                messages.append({"role": "function", "name": "get_weather", "content": "Oslo has sun"})
    assert message.content == ANSWER
    assert "Oslo has sun" in prompts[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(client: openai.OpenAI, choice: Any) -> None:
    """Tool loop: `tool_choice` makes the default model itself call, with arguments that fit the schema."""
    reply = client.chat.completions.create(
        model=NAME,
        messages=ASK,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_parse(client: openai.OpenAI, llm: LLM) -> None:
    """`.parse`: a pydantic model as `response_format`, and a strict tool with parsed arguments."""
    with scripted(llm, '{"city": "Oslo", "degrees": 12}'):
        reply = client.chat.completions.parse(model=NAME, messages=ASK, response_format=Report)
    assert reply.choices[0].message.parsed == Report(city="Oslo", degrees=12)
    with scripted(llm, tool_call("Report", city="Oslo", degrees=12)):
        tools = [openai.pydantic_function_tool(Report)]
        reply = client.chat.completions.parse(model=NAME, messages=ASK, tools=tools)
    assert reply.choices[0].message.tool_calls
    assert reply.choices[0].message.tool_calls[0].function.parsed_arguments == Report(city="Oslo", degrees=12)


@pytest.mark.parametrize("streamed", [False, True])
def test_parse_with_tools(client: openai.OpenAI, llm: LLM, streamed: bool) -> None:
    """`.parse`: with `tools` and `response_format` together, calls come first, then the parsed object."""
    tool = openai.pydantic_function_tool(Report, name="get_report")
    messages, fields = list(ASK), {"model": NAME, "tools": [tool], "response_format": Report}
    parsed = Report(city="Oslo", degrees=12)
    with scripted(llm, tool_call("get_report", city="Oslo", degrees=12), parsed.model_dump_json()) as prompts:
        for _ in range(2):
            if streamed:
                with client.chat.completions.stream(messages=messages, **fields) as stream:
                    message: Any = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.parse(messages=messages, **fields).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or []:
                assert call.function.parsed_arguments == parsed
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "taken"})
    assert message.parsed == parsed
    assert "taken" in prompts[1]


def test_parse_of_the_model(client: openai.OpenAI) -> None:
    """`.parse`: the grammar makes the default model itself follow the schema."""
    reply = client.chat.completions.parse(
        model=NAME, messages=ASK, response_format=Report, max_tokens=200, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Report)


def test_completions(client: openai.OpenAI) -> None:
    """Completions: several prompts, streamed and not."""
    asked: dict[str, Any] = {"model": NAME, "prompt": ["One, two,", "Red, green,"], "temperature": 0}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == texts
    assert all(texts)


def test_embeddings(client: openai.OpenAI) -> None:
    """Embeddings: vectors of length 1, the same as floats and as base64; a text is nearest to itself."""
    texts = ["The sky is blue.", "Interest rates rose."]
    vectors = [one.embedding for one in client.embeddings.create(model=NAME, input=texts).data]
    plain = client.embeddings.create(model=NAME, input=texts, encoding_format="float")
    for vector, other in zip(vectors, plain.data, strict=True):
        assert vector == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-4)
    again = client.embeddings.create(model=NAME, input=texts[1]).data[0].embedding
    near = [sum(a * b for a, b in zip(again, vector, strict=True)) for vector in vectors]
    assert near[1] == pytest.approx(1, abs=1e-3)
    assert near[0] < near[1] - 0.01
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 4


def test_errors(client: openai.OpenAI, llm: LLM) -> None:
    """Errors: the client raises its own classes, also for a failure in the middle of a stream."""
    create: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="not served here"):
        create(model="other", messages=ASK)
    with pytest.raises(openai.BadRequestError) as refused:
        create(model=NAME, messages=ASK, max_tokens=-1)
    assert refused.value.param == "max_tokens"
    with (
        scripted(llm, EngineError("the forward failed")),
        pytest.raises(openai.APIError, match="the forward"),
    ):
        list(create(model=NAME, messages=ASK, stream=True))
    with LiveServer(llm, api_key="secret") as server:
        url = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as friend:
            assert friend.models.list().data
