"""Fields that constrain a reply: each form is enforced, and contradictions and bad values are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from skim import LLM
from tests import tiny
from tests.live import NAME, LiveServer

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
JSON_REPLY = r'\{"a": ?[12]\}'
LARK = 'start: "x" d\nd: /[0-9]{2}/'
GBNF = 'root ::= "x" d d\nd ::= [0-9]'
GRAMMAR_REPLY = "x[0-9]{2}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm, LiveServer(llm, max_schema_size="1K") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def body(path: str, **fields: Any) -> dict[str, Any]:
    start = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    return {**start, "max_tokens": 200, "seed": 3, **fields}


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    assert "X-Skim-Ignored" not in reply.headers
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


ENFORCED: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        JSON_REPLY,
    ),
    "json_schema without a name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        JSON_REPLY,
    ),
    "llama.cpp's json_schema": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON_REPLY),
    "llama.cpp's json_object": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_REPLY),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, JSON_REPLY),
    "structured json text": ({"structured_outputs": {"json": TEXT}}, JSON_REPLY),
    "structured regex": ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "structured lark": ({"structured_outputs": {"grammar": LARK}}, GRAMMAR_REPLY),
    "structured gbnf": ({"structured_outputs": {"grammar": GBNF}}, GRAMMAR_REPLY),
    "guided_json": ({"guided_json": SCHEMA}, JSON_REPLY),
    "guided_json text": ({"guided_json": TEXT}, JSON_REPLY),
    "guided_regex": ({"guided_regex": r"\d{2}-[xy]"}, "[0-9]{2}-[xy]"),
    "guided_choice": ({"guided_choice": ["a b", 'c"']}, 'a b|c"'),
    "guided_grammar": ({"guided_grammar": GBNF}, GRAMMAR_REPLY),
    "grammar in GBNF": ({"grammar": GBNF}, GRAMMAR_REPLY),
    "grammar in Lark": ({"grammar": LARK}, GRAMMAR_REPLY),
    "json_schema of llama.cpp": ({"json_schema": SCHEMA}, JSON_REPLY),
    "beside fields that ask for nothing": (
        {
            "guided_choice": ["a"],
            "response_format": {"type": "text"},
            "grammar": "",
            "guided_json": None,
            "structured_outputs": {"json_object": False},
        },
        "a",
    ),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("name", ENFORCED)
def test_a_constraint_is_enforced(http: httpx.Client, path: str, name: str) -> None:
    fields, pattern = ENFORCED[name]
    plain = http.post(path, json=body(path, max_tokens=8)).json()["choices"][0]
    assert not re.fullmatch(pattern, str(plain.get("text", plain.get("message", {}).get("content"))))
    assert re.fullmatch(pattern, text_of(http.post(path, json=body(path, **fields))))


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    for seed in range(20):
        choice = http.post(path, json=body(path, seed=seed, **fields)).json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text[0] == "{"
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
            return
    pytest.fail("no object ended")


def test_a_streamed_reply_is_constrained_too(http: httpx.Client) -> None:
    with http.stream(
        "POST", COMPLETE, json=body(COMPLETE, guided_choice=["yes", "no"], stream=True)
    ) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
    assert text in ("yes", "no")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two fields": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "a format and a field": (
        {"response_format": {"type": "json_object"}, "guided_json": SCHEMA},
        "guided_json",
    ),
    "llama.cpp's two": ({"grammar": GBNF, "json_schema": SCHEMA}, "json_schema"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "structural_tag": ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    "a format without its schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    "a format of another name": ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    "a schema that is no schema": ({"guided_json": [1]}, "guided_json"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json"),
    "a schema beyond a limit": ({"json_schema": {"type": "string", "minLength": 10**9}}, "json_schema"),
    "a keyword that is not supported": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
    ),
    "a bad regex": ({"guided_regex": "("}, "guided_regex"),
    "a regex that is no text": ({"guided_regex": 5}, "guided_regex"),
    "an empty regex": ({"guided_regex": ""}, "guided_regex"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "a choice that is no text": ({"guided_choice": [1]}, "guided_choice[0]"),
    "a bad grammar": ({"grammar": "root ::= nothing"}, "grammar"),
    "a bad structured regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "a large choice": ({"guided_choice": ["a" * 2000]}, "guided_choice"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_constraint_is_refused_by_name(http: httpx.Client, path: str, name: str) -> None:
    fields, param = REFUSED[name]
    reply = http.post(path, json=body(path, **fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert param.partition("[")[0].rpartition(".")[2] in error["message"]


# -- with tools

TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
WANTED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def called(message: dict[str, Any]) -> bool:
    """True if the message is one call, False if it is JSON. Checks either."""
    if message["tool_calls"]:
        assert message["content"] is None
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "look"
            assert re.fullmatch(JSON_REPLY, call["function"]["arguments"])
        return True
    assert re.fullmatch(JSON_REPLY, message["content"])
    return False


@pytest.mark.parametrize("strict", [None, True])
def test_tools_with_a_format_give_calls_or_json(http: httpx.Client, strict: bool | None) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "strict": strict}}  # type: ignore[dict-item]
    fields = {"tools": [tool], "response_format": WANTED, "parallel_tool_calls": False}
    outcomes = set()
    for seed in range(40):
        choice = http.post(CHAT, json=body(CHAT, seed=seed, **fields)).json()["choices"][0]
        was_call = called(choice["message"])
        assert choice["finish_reason"] == ("tool_calls" if was_call else "stop")
        outcomes.add(was_call)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("choice", "calls"),
    [("none", False), ("required", True), ({"type": "function", "function": {"name": "look"}}, True)],
)
def test_tool_choice_decides_between_calls_and_json(http: httpx.Client, choice: Any, calls: bool) -> None:
    fields = {"tools": [TOOL], "response_format": WANTED, "tool_choice": choice}
    for seed in range(5):
        asked = body(CHAT, seed=seed, parallel_tool_calls=False, **fields)
        assert called(http.post(CHAT, json=asked).json()["choices"][0]["message"]) is calls


def test_openais_parse_with_tools_and_a_format(server: LiveServer) -> None:
    class Point(BaseModel):
        a: bool

    class Look(BaseModel):
        b: bool

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    parsed, calls = 0, 0
    for seed in range(40):
        reply = client.chat.completions.parse(
            model=NAME,
            messages=[{"role": "user", "content": "hi"}],
            tools=[openai.pydantic_function_tool(Look)],
            response_format=Point,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
        )
        message = reply.choices[0].message
        if message.tool_calls:
            assert isinstance(message.tool_calls[0].function.parsed_arguments, Look)
            calls += 1
        else:
            assert isinstance(message.parsed, Point)
            parsed += 1
    assert parsed
    assert calls
