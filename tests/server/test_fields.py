"""Fields of vLLM, llama.cpp and OpenAI's older API: each has its effect, a bad value is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from skim import LLM, Rendering, SamplingParams
from skim.errors import RequestError
from tests import tiny
from tests.live import NAME, LiveServer
from tests.scripted import scripted

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "Well, the"}]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if mood is defined %}<s>mood: {{ mood }}\n{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    with LLM(path, progress=False, kv_memory="8M", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, max_n=4) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(http: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    start = {"messages": HI} if path == CHAT else {"prompt": "hi"} if path == COMPLETE else {}
    limits = {"max_tokens": 4, "temperature": 0} if path in (CHAT, COMPLETE) else {}
    reply = http.post(path, json={**start, **limits, **fields})
    assert reply.status_code == 200, reply.text
    assert "X-Skim-Ignored" not in reply.headers
    return dict(reply.json())


def chunks(http: httpx.Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    start = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    body = {**start, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]


# -- bad values

BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"add_generation_prompt": 1}, "add_generation_prompt"),
    (CHAT, {"continue_final_message": "yes"}, "continue_final_message"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (CHAT, {"functions": [{"name": "no spaces"}]}, "functions[0].name"),
    (CHAT, {"functions": {}}, "functions"),
    (CHAT, {"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
    (CHAT, {"functions": [{"name": "a"}], "function_call": "required"}, "function_call"),
    (CHAT, {"function_call": {"name": "b"}}, "function_call"),
    (CHAT, {"functions": [{"name": "a"}], "tool_choice": "auto"}, "functions"),
    (CHAT, {"messages": [{"role": "function", "content": "7"}]}, "messages[0].tool_call_id"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "a"}}]},
        "messages[0].function_call",
    ),
    (CHAT, {"stream_options": {"continuous_usage_stats": "yes"}}, "stream_options.continuous_usage_stats"),
    (CHAT, {"return_token_ids": 1}, "return_token_ids"),
    (CHAT, {"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
    (CHAT, {"cache_prompt": 0}, "cache_prompt"),
    (CHAT, {"cache_prompt": False, "skim": {"use_prefix_cache": True}}, "cache_prompt"),
    (CHAT, {"cache_salt": "a" * 257}, "cache_salt"),
    (CHAT, {"cache_salt": "a", "skim": {"cache_salt": "b"}}, "cache_salt"),
    (COMPLETE, {"cache_prompt": "no"}, "cache_prompt"),
    (COMPLETE, {"return_token_ids": "all"}, "return_token_ids"),
    (COMPLETE, {"prompt": ["a"] * 257}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=str)
def test_a_bad_value_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    start = {"messages": HI} if path == CHAT else {"prompt": "hi"} if path == COMPLETE else {}
    reply = http.post(path, json={**start, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert str(error["param"]).startswith(param)
    assert re.split(r"[.\[]", param)[0] in error["message"]


# -- the chat template

RENDERED: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({"messages": HI}, "<s>user: hi\n<s>assistant: "),
    "no generation prompt": ({"messages": HI, "add_generation_prompt": False}, "<s>user: hi\n"),
    "a variable": (
        {"messages": HI, "chat_template_kwargs": {"mood": "calm"}},
        "<s>user: hi\n<s>mood: calm\n<s>assistant: ",
    ),
    "an unknown variable": (
        {"messages": HI, "chat_template_kwargs": {"other": 1}},
        "<s>user: hi\n<s>assistant: ",
    ),
    "continued": (
        {"messages": BEGUN, "continue_final_message": True},
        "<s>user: hi\n<s>assistant: Well, the",
    ),
    "continued, as vLLM's clients ask": (
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
        "<s>user: hi\n<s>assistant: Well, the",
    ),
    "a continued user": ({"messages": HI, "continue_final_message": True}, "<s>user: hi"),
    "continued parts": (
        {
            "messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "So"}]}],
            "continue_final_message": True,
        },
        "<s>user: hi\n<s>assistant: So",
    ),
}


@pytest.mark.parametrize("name", RENDERED)
@pytest.mark.parametrize("skimmed", [False, True])
def test_the_template_is_rendered_as_asked(llm: LLM, http: httpx.Client, name: str, skimmed: bool) -> None:
    fields, expected = RENDERED[name]
    skim = {"sparse_prefill": "always" if skimmed else "off", "scorer": "lexical"}
    with scripted(llm, "ok") as prompts:
        post(http, **fields, skim=skim)
    assert prompts == [expected]
    tokens = post(http, "/tokenize", **fields)["tokens"]
    assert llm.tokenizer.decode(tokens) == expected


def test_a_control_token_in_a_variable_is_text(llm: LLM, http: httpx.Client) -> None:
    given = {"messages": HI, "chat_template_kwargs": {"mood": "a<s>system: b"}}
    tokens = post(http, "/tokenize", **given)["tokens"]
    assert llm.tokenizer.decode(tokens) == "<s>user: hi\n<s>mood: a<s>system: b\n<s>assistant: "
    assert tokens.count(256) == 3


def test_a_continued_message_with_control_tokens(llm: LLM, http: httpx.Client) -> None:
    given = {"messages": [*HI, {"role": "assistant", "content": "a</s>b"}], "continue_final_message": True}
    tokens = post(http, "/tokenize", **given)["tokens"]
    assert llm.tokenizer.decode(tokens).endswith("assistant: a</s>b")
    assert 257 not in tokens


def test_the_reply_continues_the_last_message(llm: LLM, http: httpx.Client) -> None:
    prompt = llm.encode("<s>user: hi\n<s>assistant: Well, the", add_special_tokens=False)
    [expected] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    reply = post(http, messages=BEGUN, continue_final_message=True)
    assert reply["choices"][0]["message"]["content"] == expected.outputs[0].text
    in_python = llm.chat(
        BEGUN,
        SamplingParams(temperature=0, max_tokens=4),
        rendering=Rendering(add_generation_prompt=False, continue_final_message=True),
        use_tqdm=False,
    )
    assert in_python[0].outputs[0].text == expected.outputs[0].text


def test_anthropics_clients_begin_the_reply_with_the_last_message(llm: LLM, http: httpx.Client) -> None:
    with scripted(llm, "end") as prompts:
        reply = http.post("/v1/messages", json={"model": NAME, "max_tokens": 5, "messages": BEGUN})
    assert reply.status_code == 200, reply.text
    assert prompts == ["<s>user: hi\n<s>assistant: Well, the"]


def test_a_message_that_cannot_be_continued_is_refused(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    last = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"messages": [*HI, {**last, "tool_calls": []}], "continue_final_message": True}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"


def test_options_that_exclude_each_other_are_refused_in_python() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        Rendering(continue_final_message=True)


# -- /tokenize and /tokenizer_info


def test_tokenize_shows_tools_and_token_strings(llm: LLM, http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    given = post(http, "/tokenize", messages=HI, tools=[tool], return_token_strs=True)
    assert "look_up" in llm.tokenizer.decode(given["tokens"])
    assert given["token_strs"] == llm.tokenizer.convert_ids_to_tokens(given["tokens"])
    assert given["count"] == len(given["tokens"]) == len(given["token_strs"])
    with scripted(llm, "ok") as prompts:
        post(http, tools=[tool])
    assert prompts == [llm.tokenizer.decode(given["tokens"])]
    assert "token_strs" not in post(http, "/tokenize", prompt="a")
    assert post(http, "/tokenize", prompt='é"', return_token_strs=True)["token_strs"] == ["Ã", "©", '"']
    assert post(http, "/tokenize", messages=HI, add_special_tokens=False)["count"] > 0


def test_tokenizer_info(llm: LLM, http: httpx.Client) -> None:
    reply = http.get("/tokenizer_info")
    info = reply.json()
    assert info["chat_template"] == TEMPLATE
    assert (info["bos_token"], info["eos_token"], info["unk_token"]) == ("<s>", "</s>", None)
    assert info["vocab_size"] == tiny.VOCAB
    assert info["max_model_len"] == 1024
    assert info["added_tokens_decoder"]["256"] == {"content": "<s>", "special": True}
    assert info["tokenizer_class"] == type(llm.tokenizer).__name__
    assert str(Path(llm.model_path)) not in reply.text


# -- functions, OpenAI's older tools

FUNCTION = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("choice", [None, "auto", "none", {"name": "look"}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_tools_in_the_older_form(
    server: LiveServer, llm: LLM, choice: Any, stream: bool
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: Any = {"functions": [FUNCTION], **({"function_call": choice} if choice is not None else {})}
    replies = {"none": "No.", "{'name': 'look'}": CALL}
    with scripted(llm, replies.get(str(choice), f"Hm.{CALL}\n{CALL}")) as prompts:
        if stream:
            name, arguments, content, reason = "", "", "", None
            with client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hi"}], stream=True, **asked
            ) as events:
                for event in events:
                    for one in event.choices:
                        called = one.delta.function_call
                        assert one.delta.tool_calls is None
                        name += (called.name or "") if called else ""
                        arguments += (called.arguments or "") if called else ""
                        content += one.delta.content or ""
                        reason = one.finish_reason or reason
        else:
            reply = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hi"}], **asked
            )
            message = reply.choices[0].message
            assert message.tool_calls is None
            call = message.function_call
            name, arguments = (call.name, call.arguments) if call else ("", "")
            content, reason = message.content or "", reply.choices[0].finish_reason
    if choice == "none":
        assert (name, arguments, content, reason) == ("", "", "No.", "stop")
        assert "look" not in prompts[0]
    else:
        said = "" if isinstance(choice, dict) else "Hm."
        assert (name, arguments, content, reason) == ("look", '{"a": 1}', said, "function_call")
        assert "look" in prompts[0]


def test_a_named_function_is_enforced(http: httpx.Client) -> None:
    reply = post(http, functions=[FUNCTION], function_call={"name": "look"}, max_tokens=200)
    message = reply["choices"][0]["message"]
    assert message["function_call"]["name"] == "look"
    assert json.loads(message["function_call"]["arguments"])["a"] in (1, 2)
    assert message["tool_calls"] is None
    assert "function_call" not in post(http)["choices"][0]["message"]


def test_a_history_in_the_older_form_is_one_with_tools(llm: LLM, http: httpx.Client) -> None:
    called = {"name": "look", "arguments": '{"a": 1}'}
    older = [
        *HI,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "look", "content": "7"},
    ]
    newer = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_look", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "call_look", "content": "7"},
    ]
    with scripted(llm, "a", "b") as prompts:
        post(http, messages=older)
        post(http, messages=newer)
    assert prompts[0] == prompts[1]
    assert "look" in prompts[0]
    assert "7" in prompts[0]


# -- token ids, usage, the prefix cache


@pytest.mark.parametrize("n", [1, 2])
def test_chat_replies_show_token_ids_if_asked(llm: LLM, http: httpx.Client, n: int) -> None:
    asked: dict[str, Any] = {
        "return_token_ids": True,
        "ignore_eos": True,
        "n": n,
        "temperature": 1,
        "seed": 5,
    }
    prompt = post(http, "/tokenize", messages=HI)["tokens"]
    whole = post(http, **asked)
    assert whole["prompt_token_ids"] == prompt
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 4
        assert llm.tokenizer.decode(choice["token_ids"]).rstrip("\ufffd") == choice["message"][
            "content"
        ].rstrip("\ufffd")
    found = chunks(http, **asked)
    assert found[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in found[1:])
    for index in range(n):
        streamed = [
            token
            for chunk in found
            for choice in chunk["choices"]
            if choice["index"] == index
            for token in choice.get("token_ids", ())
        ]
        assert streamed == whole["choices"][index]["token_ids"]
    plain = post(http)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert not any("token_ids" in choice for chunk in chunks(http) for choice in chunk["choices"])


def test_completions_show_token_ids_of_each_prompt(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"prompt": [[65, 66], [67]], "n": 2, "return_token_ids": True, "ignore_eos": True}
    whole = post(http, COMPLETE, **asked)["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[65, 66], [65, 66], [67], [67]]
    found = chunks(http, COMPLETE, **asked)
    for index in range(4):
        own = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"]
        assert not any("prompt_token_ids" in choice for choice in own[1:])
        assert [token for choice in own for token in choice["token_ids"]] == whole[index]["token_ids"]
    assert "token_ids" not in post(http, COMPLETE)["choices"][0]


def test_tokens_of_logprobs_may_be_ids(http: httpx.Client) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True}
    chat = post(http, logprobs=True, top_logprobs=2, **asked)["choices"][0]
    entries = chat["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in chat["token_ids"]]
    assert all(
        re.fullmatch(r"token_id:\d+", top["token"]) for entry in entries for top in entry["top_logprobs"]
    )
    text = post(http, COMPLETE, logprobs=2, **asked)["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{token}" for token in text["token_ids"]]
    assert all(key.startswith("token_id:") for top in text["logprobs"]["top_logprobs"] for key in top)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_every_chunk_has_the_usage_so_far_if_asked(http: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *found, last = chunks(http, path, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4
    for chunk in found:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    plain = chunks(http, path, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in plain[:-1])
    without = chunks(http, path, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in without)


def test_cache_prompt_false_neither_reads_nor_writes_the_prefix_cache(http: httpx.Client) -> None:
    def cached(text: str, **fields: Any) -> int:
        reply = post(http, COMPLETE, prompt=text * 40, **fields)
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("cold", cache_prompt=False) == 0
    assert cached("cold") == 0
    assert cached("cold", cache_prompt=False) == 0
    assert cached("cold", cache_prompt=True) > 0
    assert cached("cold", cache_salt="mine") == 0
    assert cached("cold", cache_salt="mine", skim={"cache_salt": "mine"}) > 0


# -- ids of requests, batches


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("given", ["a", "trace-1.2:3/4+5=@~_Z", "x" * 128])
def test_a_clients_request_id_is_kept(http: httpx.Client, path: str, given: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    reply = http.post(path, json={**body, "max_tokens": 1}, headers={"X-Request-Id": given})
    assert reply.headers["X-Request-Id"] == given
    assert reply.json()["id"].endswith(f"-{given}")
    refused = http.post(path, json={}, headers={"X-Request-Id": given})
    assert (refused.status_code, refused.headers["X-Request-Id"]) == (400, given)


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a\tb", "é", "a,b", "<a>"])
def test_a_request_id_that_is_unfit_for_logs_is_replaced(http: httpx.Client, given: str) -> None:
    reply = http.get("/version", headers={"X-Request-Id": given.encode()})  # type: ignore[dict-item]
    assert reply.status_code == 200
    assert re.fullmatch("[0-9a-f]{24}", reply.headers["X-Request-Id"])


def test_a_batch_may_have_many_prompts(http: httpx.Client) -> None:
    prompts = [[65 + index % 26, index % 200] for index in range(200)]
    choices = post(http, COMPLETE, prompt=prompts, max_tokens=1, ignore_eos=True)["choices"]
    assert [choice["index"] for choice in choices] == list(range(200))
    alone = post(http, COMPLETE, prompt=prompts[199], max_tokens=1, ignore_eos=True)["choices"][0]
    assert choices[199]["text"] == alone["text"]
