"""`/v1/messages` without its client: translation in and out, events, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skim import LLM
from skim.config import ServerConfig
from skim.errors import EngineError
from skim.server.errors import ApiError
from skim.server.messages.events import MessageEvents
from skim.server.messages.into_chat import chat_body
from skim.server.messages.replies import INVALID_JSON, error_body, input_of, message_of
from skim.server.messages.requests import MessagesRequest
from skim.server.parse import validated
from skim.server.protocol import Checking
from skim.server.protocol.requests import ChatRequest
from tests import tiny
from tests.live import NAME, LiveServer, held_engine
from tests.scripted import scripted
from tests.server.chat_replies import chunks_of, reply_of

TOOL = {"name": "look", "description": "Look up.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama", window=8192)
    with LLM(path, progress=False, kv_memory="16M") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, api_key="secret", keepalive=0.05) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client(headers={"x-api-key": "secret"}) as client:
        yield client


def body(content: Any = "Hello.", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 200, "messages": [{"role": "user", "content": content}], **more}


def translated(**fields: Any) -> dict[str, Any]:
    checking = Checking(ServerConfig())
    chat = chat_body(validated(MessagesRequest, {"model": "m", "max_tokens": 5, **fields}, checking))
    validated(ChatRequest, chat, checking)
    return {name: value for name, value in chat.items() if value is not None}


def test_a_conversation_becomes_chat_messages() -> None:
    chat = translated(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Where is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "here"}],
                    },
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "So?"},
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "long"}},
                ],
            },
        ],
        stop_sequences=["\n\n"],
        metadata={"user_id": "me"},
    )
    function = {"name": "look", "arguments": '{"at": "Oslo"}'}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "here"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "So?"},
                {"type": "text", "text": "<document>\nT\nlong\n</document>"},
            ],
        },
    ]
    assert (chat["max_completion_tokens"], chat["stop"], chat["user"]) == (5, ["\n\n"], "me")


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_chat_template(kind: str, enabled: bool) -> None:
    checking = Checking(ServerConfig())
    thinking = {"type": kind, "budget_tokens": 1024}
    request = validated(MessagesRequest, {**body(), "thinking": thinking}, checking)
    assert chat_body(request)["chat_template_kwargs"] == {"enable_thinking": enabled}
    assert checking.ignored == {"thinking.budget_tokens"}
    assert "chat_template_kwargs" not in translated(messages=body()["messages"])


@pytest.mark.parametrize(
    ("choice", "asked", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, True),
    ],
)
def test_tool_choices_are_translated(choice: dict[str, Any], asked: Any, parallel: bool) -> None:
    chat = translated(messages=body()["messages"], tools=[TOOL], tool_choice=choice)
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (asked, parallel)
    assert chat["tools"][0]["function"]["parameters"] == TOOL["input_schema"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "calls no MCP servers"),
        ({"max_tokens": 0}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_unsupported_requests_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as error:
        translated(**{"messages": body()["messages"], **fields})
    assert error.value.status == 400
    assert message in error.value.message


# -- out


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from events, which must come in a valid order."""
    start, *rest = events
    assert start["type"] == "message_start"
    message, partial, opened = dict(start["message"]), "", None
    message["content"] = []
    for event in rest:
        kind = event["type"]
        if kind == "content_block_start":
            assert opened is None
            opened = event["index"]
            assert opened == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            partial = ""
        elif kind == "content_block_delta":
            assert opened == event["index"]
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            else:
                partial += delta["partial_json"]
        elif kind == "content_block_stop":
            assert opened == event["index"]
            opened = None
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = input_of(partial)
        elif kind == "message_delta":
            assert opened is None
            message |= event["delta"]
            message |= {"usage": event["usage"], "skim": event["skim"]}
    assert [event["type"] for event in events][-1] == "message_stop"
    return message


@settings(max_examples=60, deadline=None, database=None)
@given(
    text=st.text("ab \n", max_size=8),
    thought=st.sampled_from([""]),
    calls=st.lists(st.sampled_from(['{"at": "Oslo"}', "{}", '{"a": [1, 2]}']), max_size=3),
    ending=st.sampled_from([("stop", None), ("stop", "##"), ("length", None), ("tool_calls", None)]),
    cut=st.integers(1, 9),
)
def test_events_assemble_to_the_whole_message(
    text: str, thought: str, calls: list[str], ending: tuple[str, str | None], cut: int
) -> None:
    events = MessageEvents("msg_1", "m")
    found = events.begin(9)
    for chunk in chunks_of(text, thought, calls, *ending, cut):
        found += events.push(chunk)
    whole = message_of(reply_of(text, thought, calls, *ending), "msg_1").model_dump()
    assert assembled(found) == whole


def test_arguments_that_are_not_an_object_are_kept_as_text() -> None:
    assert input_of('{"a": 1}') == {"a": 1}
    assert input_of('{"a": ') == {INVALID_JSON: '{"a": '}
    assert input_of("[1]") == {INVALID_JSON: "[1]"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    found = error_body(ApiError(status, "no"), "r1")
    assert found == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "r1"}


# -- the live server


def test_the_model_may_be_left_out(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, "Hello."):
        reply = client.post(
            "/v1/messages", json={name: value for name, value in body().items() if name != "model"}
        )
    assert (reply.status_code, reply.json()["model"]) == (200, NAME)


def test_a_reply_and_its_count(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, "Fine, and you?##no") as prompts:
        reply = client.post("/v1/messages", json=body(system="Be kind.", stop_sequences=["##"]))
    found = reply.json()
    assert reply.status_code == 200, found
    assert found["content"] == [{"type": "text", "text": "Fine, and you?"}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "##")
    assert "Be kind." in prompts[0]
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    fields = {name: value for name, value in body(system="Be kind.").items() if name != "max_tokens"}
    count = client.post("/v1/messages/count_tokens", json=fields).json()
    assert count == {"input_tokens": found["usage"]["input_tokens"]}


def test_tool_calls_are_blocks(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, f"One moment.\n{CALL}", CALL):
        whole = client.post("/v1/messages", json=body(tools=[TOOL])).json()
        streamed = sse(client.post("/v1/messages", json=body(tools=[TOOL], stream=True)))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {"at": "Oslo"}
    assert whole["stop_reason"] == "tool_use"
    message = assembled([event for event in streamed if event["type"] != "ping"])
    assert [block["input"] for block in message["content"]] == [{"at": "Oslo"}]


def sse(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    found = []
    for part in reply.text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_refusals_have_anthropics_shape_on_these_routes_only(
    server: LiveServer, client: httpx.Client
) -> None:
    wrong = client.post("/v1/messages", json=body(max_tokens="many"))
    assert wrong.status_code == 400
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert wrong.json()["request_id"] == wrong.headers["request-id"]
    other = client.post("/v1/messages", json=body(model="other"))
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    with server.client() as stranger:
        refused = stranger.post("/v1/messages", json=body())
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert "code" in stranger.post("/v1/chat/completions", json={}).json()["error"]


def test_a_silent_stream_is_pinged_and_a_late_failure_is_an_error_event(
    client: httpx.Client, llm: LLM
) -> None:
    with held_engine(llm) as go, client.stream("POST", "/v1/messages", json=body(stream=True)) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: message_start"
        while next(lines) != "event: ping":
            pass
        go.set()
        reply.close()
    with scripted(llm, EngineError("the forward failed")):
        events = sse(client.post("/v1/messages", json=body(stream=True)))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "the forward failed"}
