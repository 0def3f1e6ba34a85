"""Reasoning and calls over HTTP: whole replies and streams agree, by every protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from skim import LLM
from skim.sampling.grammar import Grammar
from tests import tiny
from tests.live import NAME, LiveServer
from tests.scripted import scripted
from tests.server.formats.tool_rows import TOOLS

MESSAGES = [{"role": "user", "content": "Hi"}]
HARMONY = (
    "<|channel|>analysis<|message|>Hm, 漢.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
    '<|constrain|>json<|message|>{"a": "é"}<|call|>'
)
CASES: dict[str, tuple[dict[str, str], str, str, str | None, list[tuple[str, str]]]] = {
    "think": (
        {"reasoning_parser": "think", "tool_parser": "hermes"},
        '<think>\nHm, 漢.\n</think>\n\nOK.\n<tool_call>{"name": "now", "arguments": {"a": "é"}}</tool_call>',
        "Hm, 漢.",
        "OK.",
        [("now", '{"a": "é"}')],
    ),
    "answer": (
        {"reasoning_parser": "deepseek_r1", "tool_parser": "deepseek"},
        "Hm.</think>\n\nOK.",
        "Hm.",
        "OK.",
        [],
    ),
    "harmony": (
        {"reasoning_parser": "gpt_oss", "tool_parser": "gpt_oss"},
        HARMONY,
        "Hm, 漢.",
        None,
        [("now", '{"a": "é"}')],
    ),
    "mistral": (
        {"reasoning_parser": "mistral", "tool_parser": "mistral"},
        "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
        "Hm.",
        None,
        [("now", "{}"), ("now", "{}")],
    ),
    "none": ({"reasoning_parser": "none"}, "<think>a</think>b", "", "<think>a</think>b", []),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama", window=8192)
    with LLM(path, progress=False, kv_memory="16M") as llm:
        yield llm


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's chunks add up to."""
    found: dict[str, Any] = {"reasoning_content": "", "reasoning": "", "content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for field in ("reasoning_content", "reasoning", "content"):
                found[field] += delta.get(field) or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    found["tool_calls"].append([call["function"]["name"], ""])
                found["tool_calls"][call["index"]][1] += call["function"]["arguments"]
            found["finish_reason"] = choice["finish_reason"]
    return found


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("cut", [1, pytest.param(4, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize("case", CASES)
def test_whole_replies_and_streams_agree(llm: LLM, case: str, cut: int) -> None:
    parsers, text, reasoning, content, calls = CASES[case]
    body = {"messages": MESSAGES, "tools": TOOLS}
    usage = {"stream_options": {"include_usage": True}}
    with (
        LiveServer(llm, **parsers) as server,
        server.client() as client,
        scripted(llm, text, text, cut=cut),
    ):
        whole = client.post("/v1/chat/completions", json=body).json()
        chunks = streamed(client, "/v1/chat/completions", body | usage)
    [choice] = whole["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"] or "") == (content, reasoning)
    assert message["reasoning"] == message["reasoning_content"]
    assert [
        (one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"] or ()
    ] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    found = joined(chunks[:-1])
    assert (found["reasoning_content"], found["content"]) == (reasoning, content or "")
    assert found["reasoning"] == reasoning
    assert [tuple(call) for call in found["tool_calls"]] == calls
    assert found["finish_reason"] == choice["finish_reason"]
    for usage in (whole["usage"], chunks[-1]["usage"]):
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert bool(counted) is bool(reasoning)
        assert counted <= usage["completion_tokens"]
        if cut == 1 and case == "answer":
            assert counted == len("Hm.</think>")


def test_responses_and_messages_carry_reasoning(llm: LLM) -> None:
    parsers, text, reasoning, content, _ = CASES["think"]
    with LiveServer(llm, **parsers) as server, server.client() as client:
        with scripted(llm, text, text):
            body: dict[str, Any] = {"input": "Hi", "tools": [{"type": "function", **TOOLS[2]["function"]}]}
            response = client.post("/v1/responses", json=body).json()
            events = streamed(client, "/v1/responses", body)
        tool = {"name": "now", "input_schema": TOOLS[2]["function"]["parameters"]}
        with scripted(llm, text, text):
            body = {"model": NAME, "max_tokens": 500, "messages": MESSAGES, "tools": [tool]}
            message = client.post("/v1/messages", json=body).json()
            blocks = streamed(client, "/v1/messages", body)
    thought, said, called = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": reasoning}]
    assert said["content"][0]["text"] == content
    assert called["type"] == "function_call"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    kinds = [event["type"] for event in events]
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
    done = [event["text"] for event in events if event["type"] == "response.reasoning_text.done"]
    assert done == [reasoning]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0]["thinking"] == reasoning
    pieces = [
        event["delta"].get("thinking", "") for event in blocks if event["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == reasoning


def test_only_one_call_if_parallel_calls_are_off(llm: LLM) -> None:
    parsers, text, *_ = CASES["mistral"]
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    with LiveServer(llm, **parsers) as server, server.client() as client, scripted(llm, text):
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_earlier_reasoning_reaches_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}[{{ m.reasoning_content }}]{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    for field in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Four.", field: "Hm."}
        with LiveServer(llm) as server, server.client() as client, scripted(llm, "OK.") as prompts:
            reply = client.post("/v1/chat/completions", json={"messages": [*MESSAGES, said, *MESSAGES]})
        assert reply.status_code == 200
        assert "x-skim-ignored" not in reply.headers
        assert "assistant:Four.[Hm.]" in prompts[0]
    odd = {"role": "assistant", "content": "Four.", "reasoning": {"effort": "high"}}
    with LiveServer(llm) as server, server.client() as client, scripted(llm, "OK."):
        assert client.post("/v1/chat/completions", json={"messages": [*MESSAGES, odd]}).status_code == 200


def test_the_engine_shows_special_tokens_to_the_parser_and_stops_at_theirs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A model that is forced to write a call in special tokens; the plain request does not see them."""
    path = tmp_path_factory.mktemp("special")
    model, tokenizer = tiny.build("llama", window=2048), tiny.tokenizer()
    model.resize_token_embeddings(tiny.VOCAB + 4)
    model.save_pretrained(path)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]}
    )
    tokenizer.chat_template += "{# [TOOL_CALLS] [ARGS] [THINK] #}"
    tokenizer.save_pretrained(path)
    named = {"type": "function", "function": {"name": "now"}}
    forced = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "tool_choice": named, "temperature": 0}
    [opening] = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]"])
    plain = {"messages": MESSAGES, "max_tokens": 3, "logit_bias": {str(opening): 100}, "temperature": 0}
    with (
        LLM(path, progress=False, kv_memory="16M") as llm,
        LiveServer(llm) as server,
        server.client() as client,
    ):
        [choice] = client.post("/v1/chat/completions", json=forced).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        found = joined(streamed(client, "/v1/chat/completions", forced))
        assert found["tool_calls"] == [["now", "{}"]]
        [choice] = client.post("/v1/chat/completions", json=plain).json()["choices"]
        assert choice["message"]["content"] == ""
        [choice] = client.post("/v1/chat/completions", json={**plain, "tools": TOOLS}).json()["choices"]
        assert choice["message"]["content"] == "[TOOL_CALLS]" * 3


def test_the_answer_of_a_model_that_thinks_in_the_prompt_is_constrained_after_its_thought(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Grammar | None] = []
    submit = llm.engine.submit

    def spy(request: Any, emit: Any = None) -> Any:
        seen.append(request.params.grammar)
        return submit(request, emit)

    monkeypatch.setattr(llm.tokenizer, "chat_template", str(llm.tokenizer.chat_template) + "<think>\n")
    monkeypatch.setattr(llm.engine, "submit", spy)
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 5}
    with LiveServer(llm) as server, server.client() as client:
        [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    [grammar] = seen
    assert grammar is not None
    assert "</think>" in grammar.source.replace("\\/", "/")
