"""Fields that clients add to requests and histories: ignored ones are named, and change nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from skim import LLM
from skim.config import ServerConfig
from skim.server.parse import parse_body
from skim.server.protocol.messages import for_template
from skim.server.protocol.requests import ChatRequest
from skim.server.reply import dump
from tests import tiny
from tests.live import NAME, LiveServer, eventually

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "7"}

HARMLESS: dict[str, Any] = {
    "store": True,
    "metadata": {"run": "1"},
    "service_tier": "auto",
    "reasoning_effort": "low",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "hi"},
    "prompt_cache_key": "a",
    "safety_identifier": "u",
    "temprature": 1,
}
"""Fields that are ignored."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm, LiveServer(llm) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def chat(messages: Any = HI, **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 3, "temperature": 0, **fields}


def answer(http: httpx.Client, body: dict[str, Any], path: str = CHAT) -> tuple[Any, str]:
    """The text of the reply, and the names in its header."""
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice.get("message", choice), reply.headers.get("X-Skim-Ignored", "")


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_harmless_fields_change_nothing_and_are_named(http: httpx.Client, path: str) -> None:
    body = chat() if path == CHAT else {"prompt": "hi", "max_tokens": 3, "temperature": 0}
    plain, none = answer(http, body, path)
    same, ignored = answer(http, {**body, **HARMLESS}, path)
    assert same == plain
    assert (none, ignored) == ("", ", ".join(sorted(HARMLESS)))


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": None, "modalities": None, "tools": None, "stop": None, "skim": None, "n": None},
        {"modalities": ["text"]},
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"stream_options": {"include_usage": True}},
        {"max_completion_tokens": 3, "max_tokens": 2},
        {"max_tokens": 3.0, "n": 1.0, "top_k": -1.0, "skim": {"min_prompt_tokens": 512.0}},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": None},
        {"use_beam_search": False, "documents": []},
        {"model": None},
        {"model": NAME},
        {"user": "u"},
    ],
    ids=str,
)
def test_what_clients_send_by_habit_is_accepted_without_a_word(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    expected, _ = answer(http, chat())
    got, ignored = answer(http, chat(**fields))
    assert got == expected
    assert set(ignored.split(", ")) <= {"", "use_beam_search", "documents"}


def test_the_newer_token_limit_counts(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=chat(max_completion_tokens=5, ignore_eos=True)).json()
    assert reply["usage"]["completion_tokens"] == 5


HISTORIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], set[str]]] = {
    "openai's model_dump": (
        [ChatCompletionMessage(role="assistant", content="7").model_dump()],
        [{"role": "assistant", "content": "7"}],
        set(),
    ),
    "openai's model_dump of a call": (
        [
            ChatCompletionMessage.model_validate(
                {"role": "assistant", "content": None, "annotations": [], "tool_calls": [CALL]}
            ).model_dump(),
            RESULT,
        ],
        [{"role": "assistant", "tool_calls": [CALL]}, RESULT],
        {"messages[].annotations"},
    ),
    "litellm": (
        [
            {
                "role": "assistant",
                "content": "7",
                "provider_specific_fields": {"refusal": None},
                "function_call": None,
                "tool_calls": [],
                "reasoning_content": "so",
            }
        ],
        [{"role": "assistant", "content": "7", "reasoning_content": "so"}],
        {"messages[].provider_specific_fields"},
    ),
    "instructor's retry": (
        [
            {"role": "assistant", "content": "7", "tool_calls": [CALL | {"index": 0}]},
            {**RESULT, "name": "look"},
        ],
        [{"role": "assistant", "content": "7", "tool_calls": [CALL]}, RESULT],
        {"messages[].tool_calls[].index", "messages[].name"},
    ),
    "a refusal": (
        [{"role": "assistant", "content": None, "refusal": "No."}],
        [{"role": "assistant", "content": "No."}],
        set(),
    ),
    "a refusal as a part": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
        set(),
    ),
    "cache marks": (
        [
            {
                "role": "user",
                "name": "me",
                "content": [{"type": "text", "text": "7", "cache_control": {"type": "ephemeral"}}],
            }
        ],
        [{"role": "user", "content": [{"type": "text", "text": "7"}]}],
        {"messages[].name", "messages[].content[].cache_control"},
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_as_clients_make_them(http: httpx.Client, name: str) -> None:
    sent, meant, ignored = HISTORIES[name]
    request, named = parse_body(ChatRequest, dump({"messages": [*HI, *sent]}), ServerConfig())
    assert [for_template(message) for message in request.messages[1:]] == meant
    assert named == ignored
    expected, _ = answer(http, chat([*HI, *meant, *HI]))
    got, header = answer(http, chat([*HI, *sent, *HI]))
    assert got == expected
    assert header == ", ".join(sorted(ignored))


@settings(max_examples=60)
@given(
    extra=st.dictionaries(st.text(max_size=80), st.none() | st.integers() | st.text(), max_size=6),
    role=st.sampled_from(["system", "user", "assistant", "developer"]),
)
def test_unknown_keys_anywhere_are_dropped_and_their_names_fit_a_header(
    extra: dict[str, Any], role: str
) -> None:
    part = {"type": "text", "text": "a"}
    bare = {"role": role, "content": [part]}
    known = {"role", "content", "type", "text", "refusal", "tool_calls", "audio"}
    extra = {key: value for key, value in extra.items() if key not in known}
    full = {**extra, "role": role, "content": [{**extra, **part}]}
    plain, _ = parse_body(ChatRequest, dump({"messages": [bare]}), ServerConfig())
    request, ignored = parse_body(ChatRequest, dump({"messages": [full]}), ServerConfig())
    assert request == plain
    given = [key for key, value in extra.items() if value is not None]
    assert bool(ignored) == bool(given)
    for name in ignored:
        assert name.isascii()
        assert name.isprintable()
        assert "," not in name
        assert name.startswith("messages[].")


def test_an_ignored_field_is_logged_once(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="skim.requests"):
        for _ in range(2):
            _, ignored = answer(http, chat(quirk=1))
            assert ignored == "quirk"
        answer(http, chat(quirk=1, quark=2))
        eventually(lambda: len(caplog.records) == 3)  # a line follows its reply
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line.get("ignored") for line in lines] == [["quirk"], None, ["quark"]]


@pytest.mark.parametrize("given", [1.5, True, "2", 1e300])
@pytest.mark.parametrize("name", ["n", "top_logprobs", "priority"])
def test_other_values_are_no_whole_numbers(http: httpx.Client, name: str, given: Any) -> None:
    reply = http.post(CHAT, json=chat(logprobs=True, **{name: given}))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_not_text_is_refused_in_words(http: httpx.Client, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    reply = http.post(CHAT, json=chat([{"role": "user", "content": [part]}]))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[0].type", "unsupported_parameter")
    assert f"'{kind}' parts cannot be read, only text" in error["message"]
