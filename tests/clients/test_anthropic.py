"""`anthropic`: the Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from skim import LLM
from skim.errors import EngineError
from tests.live import NAME, LiveServer
from tests.scripted import scripted, tool_call

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = "Let me look.\n" + tool_call("get_weather", city="Oslo")
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Any]:
    with LiveServer(llm, api_key="secret") as server, connect(server) as client:
        yield client


def connect(server: LiveServer, key: str = "secret") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def test_a_message(client: Any, llm: LLM) -> None:
    """Messages: a reply with blocks, usage, stop reason and request id."""
    with scripted(llm, "Sunny."):
        message = client.messages.create(model=NAME, max_tokens=50, system="Be brief.", messages=ASK)
    assert [block.text for block in message.content] == ["Sunny."]
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", NAME)
    assert message.usage.output_tokens > 0
    assert message._request_id
    assert message.id.startswith("msg_")


def test_a_stream(client: Any, llm: LLM) -> None:
    """Stream: `messages.stream` gives the text piece by piece, and the final message."""
    with (
        scripted(llm, "Sunny, with some wind."),
        client.messages.stream(model=NAME, max_tokens=50, messages=ASK) as stream,
    ):
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == final.content[0].text == "Sunny, with some wind."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop(client: Any, llm: LLM, streamed: bool) -> None:
    """Tools: `tool_use` and `tool_result` blocks go round, unstreamed and streamed."""
    messages = list(ASK)
    with scripted(llm, CALL, "It is sunny.") as prompts:
        for _ in range(2):
            fields = {"model": NAME, "max_tokens": 200, "messages": messages, "tools": [WEATHER]}
            if streamed:
                with client.messages.stream(**fields) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**fields)
            if message.stop_reason != "tool_use":
                break
            [call] = [block for block in message.content if block.type == "tool_use"]
            assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 12 degrees"}
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
    assert message.content[0].text == "It is sunny."
    assert "sunny, 12 degrees" in prompts[1]
    assert '{"city": "Oslo"}' in prompts[1]


def test_tokens_are_counted(client: Any, llm: LLM) -> None:
    """Count: `count_tokens` equals the usage of the same message."""
    count = client.messages.count_tokens(model=NAME, messages=ASK, system="Be brief.", tools=[WEATHER])
    with scripted(llm, "Sunny."):
        message = client.messages.create(
            model=NAME, max_tokens=5, messages=ASK, system="Be brief.", tools=[WEATHER]
        )
    assert count.input_tokens == message.usage.input_tokens


def test_errors_are_the_clients_own(client: Any, llm: LLM) -> None:
    """Errors: the client raises its own classes, also for a failure in the middle of a stream."""
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="other", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=NAME, max_tokens=0, messages=ASK)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with LiveServer(llm, api_key="secret") as server, pytest.raises(anthropic.AuthenticationError):
        connect(server, "wrong").messages.create(model=NAME, max_tokens=5, messages=ASK)
    with (
        scripted(llm, EngineError("the forward failed")),
        pytest.raises(anthropic.APIStatusError, match="the forward failed"),
        client.messages.stream(model=NAME, max_tokens=5, messages=ASK) as stream,
    ):
        stream.get_final_message()
