"""`/v1/responses` without its client: translation in and out, events, the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skim import LLM
from skim.config import ServerConfig
from skim.errors import EngineError
from skim.server.errors import ApiError
from skim.server.parse import validated
from skim.server.protocol import Checking
from skim.server.protocol.requests import ChatRequest
from skim.server.responses.events import ResponseEvents, ResponseFraming
from skim.server.responses.into_chat import chat_body, items_of, messages_of
from skim.server.responses.replies import finished, item_id, new_response, output_of, response_of
from skim.server.responses.requests import ResponsesRequest
from skim.server.responses.store import ResponseStore, Stored
from tests import tiny
from tests.live import NAME, LiveServer, held_engine
from tests.scripted import scripted
from tests.server.chat_replies import chunks_of, reply_of

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama", window=8192)
    with LLM(path, progress=False, kv_memory="16M") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, keepalive=0.05, max_stored_responses=4) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def asked(**fields: Any) -> ResponsesRequest:
    return validated(ResponsesRequest, {"model": NAME, "input": "Hello.", **fields}, Checking(ServerConfig()))


def translated(**fields: Any) -> dict[str, Any]:
    request = asked(**fields)
    chat = chat_body(request, items_of(request, lambda _: None))
    validated(ChatRequest, chat, Checking(ServerConfig()))
    return {name: value for name, value in chat.items() if value is not None}


# -- in


def test_items_become_chat_messages() -> None:
    chat = translated(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Where?"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "here"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "there"}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "A long text."},
                    {"type": "input_text", "text": "So?"},
                ],
            },
        ],
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("c1", "c2")
    ]
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "here"},
        {"role": "tool", "tool_call_id": "c2", "content": "there"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "A long text."}, {"type": "text", "text": "So?"}],
        },
    ]


def test_a_text_of_the_assistant_after_a_call_is_a_message_of_its_own() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "Done."}
    assert [message["role"] for message in messages_of([call, said])] == ["assistant", "assistant"]
    assert len(messages_of([said, call])) == 1
    assert messages_of([{"type": "reasoning", "summary": []}]) == []


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "required"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}},
            "tool_choice",
            {"type": "function", "function": {"name": "look"}},
        ),
        (
            {
                "tools": [TOOL, {**TOOL, "name": "other"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "look"}],
                },
            },
            "tool_choice",
            "required",
        ),
        ({"text": {"format": {"type": "json_object"}}}, "response_format", {"type": "json_object"}),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "n",
                        "schema": {"type": "object"},
                        "strict": True,
                    }
                }
            },
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
        ),
        ({"max_output_tokens": 7}, "max_completion_tokens", 7),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", True),
    ],
)
def test_fields_are_translated(fields: dict[str, Any], name: str, expected: Any) -> None:
    chat = translated(**fields)
    assert chat[name] == expected
    if "tools" in chat:
        assert [tool["function"]["name"] for tool in chat["tools"]] == ["look"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "use previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no stored response has an item"),
        ({"input": []}, "input"),
    ],
)
def test_unsupported_requests_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as error:
        translated(**fields)
    assert error.value.status == 400
    assert message in error.value.message


# -- out


@settings(max_examples=60, deadline=None, database=None)
@given(
    text=st.text("ab \n", max_size=8),
    thought=st.sampled_from(["", "Hm."]),
    calls=st.lists(st.sampled_from(['{"at": "Oslo"}', "{}", ""]), max_size=3),
    finish=st.sampled_from(["stop", "length", "tool_calls"]),
    cut=st.integers(1, 9),
)
def test_the_last_event_has_the_whole_response(
    text: str, thought: str, calls: list[str], finish: str, cut: int
) -> None:
    new = new_response(asked(tools=[TOOL]), "resp_0123456789", "m", 5, store=True)
    events = ResponseEvents(new)
    found = events.begin()
    for chunk in chunks_of(text, thought, calls, finish, None, cut):
        found += events.push(chunk)
    reply = reply_of(text, thought, calls, finish, None)
    whole = finished(new, output_of(reply, new.id), finish, reply.usage, reply.skim)
    last = found[-1]
    assert last["type"] == ("response.incomplete" if finish == "length" else "response.completed")
    assert last["response"] == whole.model_dump() == events.response.model_dump()
    assert assembled(found) == last["response"]["output"]


LOGPROB = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}


@pytest.mark.parametrize("cut", [1, 2, 99])
def test_log_probabilities_stay_with_the_text_and_leave_other_items_alone(cut: int) -> None:
    reply = ("abcd", "Hm, hm.", ['{"at": "Oslo"}', "{}"], "tool_calls", None)
    found: list[list[dict[str, Any]]] = []
    for logprobs in (None, [LOGPROB]):
        events = ResponseEvents(new_response(asked(), "resp_0123456789", "m", 5, store=True))
        every = events.begin()
        for chunk in chunks_of(*reply, cut, logprobs):
            every += events.push(chunk)
        found.append(events.response.model_dump()["output"])
        seen = [
            one for event in every for one in event.get("logprobs", ()) if event["type"].endswith("delta")
        ]
    plain, measured = found
    assert len(seen) == -(-4 // cut) == len(measured[1]["content"][0].pop("logprobs"))
    plain[1]["content"][0].pop("logprobs")
    assert measured == plain
    assert [item["type"] for item in plain][:2] == ["reasoning", "message"]


def test_a_token_without_text_at_the_end_keeps_its_log_probability() -> None:
    events = ResponseEvents(new_response(asked(), "resp_0123456789", "m", 5, store=True))
    *chunks, last = chunks_of("ab", "", [], "stop", None, 9, [LOGPROB])
    ending = chunks_of("", "", [], "stop", None, 9, [LOGPROB])[0]
    for chunk in [*chunks, ending, last]:
        events.push(chunk)
    [message] = events.response.model_dump()["output"]
    assert (message["content"][0]["text"], len(message["content"][0]["logprobs"])) == ("ab", 3)


def test_infinite_numbers_in_a_schema_do_not_end_a_stream() -> None:
    schema = {"type": "object", "maximum": float("inf")}
    form = {"type": "json_schema", "name": "f", "schema": schema}
    new = new_response(
        asked(tools=[{**TOOL, "parameters": schema}], text={"format": form}), "r", "m", 5, store=True
    )
    written = b"".join(map(ResponseFraming().event, ResponseEvents(new).begin()))
    assert b'"maximum":null' in written
    assert b"Infinity" not in written


def test_fields_that_a_reply_only_repeats_are_named_as_ignored() -> None:
    checking = Checking(ServerConfig())
    fields = {
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "look"}],
        },
    }
    request = validated(ResponsesRequest, {"input": "Hello.", "tools": [TOOL], **fields}, checking)
    assert checking.ignored == {"reasoning.effort", "text.verbosity"}
    assert new_response(request, "r", "m", 5, store=True).reasoning["effort"] == "low"


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that a client assembles; each must agree with the event that ends it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            items[-1]["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][-1]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
    return items


def test_an_items_id_names_its_response() -> None:
    assert response_of(item_id("msg", "resp_0123", 7)) == "resp_0123"


def test_events_are_numbered_and_so_is_an_error() -> None:
    framing = ResponseFraming()
    framing.event({"type": "response.created"})
    written = framing.error(ApiError(500, "no", code="engine_error")).decode()
    assert written.startswith("event: error\ndata: ")
    assert json.loads(written.split("data: ")[1]) == {
        "type": "error",
        "code": "engine_error",
        "message": "no",
        "param": None,
        "sequence_number": 1,
    }


# -- the store


class StoreMachine(RuleBasedStateMachine):
    """The store against a plain list, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(3, 10)
        self.plain: list[tuple[str, int]] = []

    @rule(name=st.sampled_from("abcde"), size=st.integers(1, 12))
    def put(self, name: str, size: int) -> None:
        kept = self.store.put(name, Stored({"output": []}, (), size))
        assert kept == (size <= 10)
        if kept:
            self.plain = [(other, n) for other, n in self.plain if other != name] + [(name, size)]
            while len(self.plain) > 3 or sum(n for _, n in self.plain) > 10:
                self.plain.pop(0)

    @rule(name=st.sampled_from("abcde"))
    def get(self, name: str) -> None:
        there = [one for one in self.plain if one[0] == name]
        assert (self.store.get(name) is not None) == bool(there)
        self.plain = [one for one in self.plain if one[0] != name] + there

    @rule(name=st.sampled_from("abcde"))
    def delete(self, name: str) -> None:
        there = [one for one in self.plain if one[0] == name]
        assert self.store.delete(name) == bool(there)
        self.plain = [one for one in self.plain if one[0] != name]

    @invariant()
    def counts(self) -> None:
        assert len(self.store) == len(self.plain)
        assert self.store.bytes == sum(n for _, n in self.plain)


StoreMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, database=None
)
TestStore = StoreMachine.TestCase


# -- the live server


def test_a_conversation_continues_by_id(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, "I am Ada.", "As I said.", "No.") as prompts:
        first = client.post("/v1/responses", json={"model": NAME, "input": "Who are you?"}).json()
        again = {"input": "Again?", "previous_response_id": first["id"], "instructions": "Be brief."}
        second = client.post("/v1/responses", json=again).json()
        third = client.post(
            "/v1/responses", json={"input": "More?", "previous_response_id": second["id"]}
        ).json()
    assert first["output"][0]["content"][0]["text"] == "I am Ada."
    assert (first["status"], first["store"], first["usage"]["output_tokens"]) == ("completed", True, 3)
    assert prompts[1].index("Be brief.") < prompts[1].index("Who are you?") < prompts[1].index("I am Ada.")
    assert "Be brief." not in prompts[2]
    assert "As I said." in prompts[2]
    items = client.get(f"/v1/responses/{third['id']}/input_items").json()["data"]
    texts = [
        item["content"] if isinstance(item["content"], str) else item["content"][0]["text"] for item in items
    ]
    assert texts == ["More?", "As I said.", "Again?", "I am Ada.", "Who are you?"]
    assert client.get(f"/v1/responses/{second['id']}").json() == second
    assert client.delete(f"/v1/responses/{second['id']}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{second['id']}").status_code == 404
    lost = client.post("/v1/responses", json={"input": "Hm?", "previous_response_id": second["id"]})
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert "--max-stored-responses" in lost.json()["error"]["message"]


def test_only_the_newest_are_kept_and_nothing_without_store(
    client: httpx.Client, server: LiveServer, llm: LLM
) -> None:
    with scripted(llm, *["Yes."] * 6):
        dropped = client.post("/v1/responses", json={"input": "Hm?", "store": False}).json()
        ids = [client.post("/v1/responses", json={"input": "Hm?"}).json()["id"] for _ in range(5)]
    assert dropped["store"] is False
    found = [client.get(f"/v1/responses/{one}").status_code for one in (dropped["id"], *ids)]
    assert found == [404, 404, 200, 200, 200, 200]
    assert len(server.service.responses) == 4


def test_calls_are_items_and_may_be_referred_to(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, CALL, "Sunny.") as prompts:
        fields = {"input": "Where?", "tools": [TOOL], "stream": True}
        events = sse(client.post("/v1/responses", json=fields))
        [call] = events[-1]["response"]["output"]
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call",
            "look",
            {"at": "Oslo"},
        )
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "here it is"}
        items = [{"role": "user", "content": "Where?"}, {"type": "item_reference", "id": call["id"]}, output]
        reply = client.post("/v1/responses", json={"input": items, "tools": [TOOL]}).json()
    assert reply["output"][0]["content"][0]["text"] == "Sunny."
    assert '"at": "Oslo"' in prompts[1]
    assert "here it is" in prompts[1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_reply_that_is_cut_is_incomplete(client: httpx.Client, llm: LLM) -> None:
    with scripted(llm, "A very long reply."):
        reply = client.post("/v1/responses", json={"input": "Hm?", "max_output_tokens": 2}).json()
    assert reply["status"] == reply["output"][0]["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}


def test_tokens_are_counted_before(client: httpx.Client, llm: LLM) -> None:
    count = client.post(
        "/v1/responses/input_tokens", json={"input": "Hm?", "instructions": "Be kind."}
    ).json()
    with scripted(llm, "Yes."):
        reply = client.post("/v1/responses", json={"input": "Hm?", "instructions": "Be kind."}).json()
    assert count == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}


def test_a_silent_stream_has_comments_and_a_late_failure_is_an_error_event(
    client: httpx.Client, llm: LLM
) -> None:
    fields = {"input": "Hm?", "stream": True}
    with held_engine(llm) as go, client.stream("POST", "/v1/responses", json=fields) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: response.created"
        while next(lines) != ": queued":
            pass
        go.set()
        reply.close()
    with scripted(llm, EngineError("the forward failed")):
        events = sse(client.post("/v1/responses", json=fields))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "error"]
    assert events[-1]["message"] == "the forward failed"


def sse(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    found = []
    for part in reply.text.strip().split("\n\n"):
        if not part.startswith(":"):
            name, data = part.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found
