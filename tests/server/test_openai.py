"""The official `openai` client, unmodified, against a live server on the default model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from skim import LLM, SamplingParams
from tests.live import NAME, LiveServer

ASK = [{"role": "user", "content": "The access code for the Oslo office is 16979. What is the code?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module", params=["sketch_dir", pytest.param("default_model_dir", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(request.getfixturevalue(request.param), progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.fixture(scope="module")
def real(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(default_model_dir, progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def real_client(real: LLM) -> Iterator[openai.OpenAI]:
    with LiveServer(real) as server, connect(server) as client:
        yield client


def connect(server: LiveServer, **options: Any) -> openai.OpenAI:
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def test_chat_answers_as_the_engine_does(real_client: openai.OpenAI, real: LLM) -> None:
    reply = real_client.chat.completions.create(
        model=NAME, messages=ASK, temperature=0, max_completion_tokens=24
    )
    [expected] = real.chat(ASK, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    [choice] = reply.choices
    assert choice.message.content == expected.outputs[0].text
    assert "16979" in choice.message.content
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "stop")
    assert (reply.object, reply.model) == ("chat.completion", NAME)
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert reply.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_repeated_prompt_is_cached_and_the_reply_reports_it(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Count the letters of this rather long sentence. " * 8}]
    first = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=2)
    again = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=2)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached
    assert cached > (first.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached >= again.usage.prompt_tokens - 16
    report = again.model_extra["skim"]
    assert report["cached_tokens"] == cached
    assert report["kept_tokens"] == report["prompt_tokens"] == again.usage.prompt_tokens
    assert all(report[f"{phase}_ms"] >= 0 for phase in ("queue", "scoring", "prefill", "decode"))
    bypassed = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0,
        max_tokens=2,
        extra_body={"skim": {"use_prefix_cache": False}},
    )
    salted = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0,
        max_tokens=2,
        extra_body={"skim": {"cache_salt": "tenant"}},
    )
    assert bypassed.model_extra["skim"]["cached_tokens"] == salted.model_extra["skim"]["cached_tokens"] == 0
    assert bypassed.choices[0].message.content == again.choices[0].message.content


def test_streamed_chat_is_the_same_text_in_well_formed_chunks(real_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = real_client.chat.completions.create(**options)
    chunks = list(
        real_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in parts[1:]] == [None] * (len(parts) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.model_extra["skim"]["generated_tokens"] == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in parts)


def test_without_usage_every_chunk_has_a_choice_and_the_last_one_the_report(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME, messages=ASK, temperature=0, max_tokens=3, stream=True
    )
    chunks = list(stream)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].model_extra["skim"]["generated_tokens"] == 3


def test_characters_are_never_split_across_chunks(client: openai.OpenAI, llm: LLM) -> None:
    """Emoji take several tokens; bias makes the model write nothing else."""
    ids = llm.encode("🦜🌊🦜", add_special_tokens=False)
    options: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Repeat: 🦜🌊🦜🌊🦜🌊"}],
        "max_tokens": 24,
        "seed": 5,
        "logit_bias": {str(token): 100 for token in ids},
    }
    whole = client.chat.completions.create(**options)
    pieces = [
        chunk.choices[0].delta.content
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].delta.content
    ]
    assert len(set(ids)) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) < 24  # some tokens were held back for the rest of their character
    broken = sum(piece.count("\ufffd") for piece in pieces)
    assert broken == (whole.choices[0].message.content or "").count("\ufffd")


def test_completions_continue_texts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["The capital of France is", "Water boils at"]
    ids = [list(llm.encode(text)) for text in texts]
    expected = [
        out.outputs[0].text
        for out in llm.generate(texts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    ]
    for prompt in (texts, ids):
        reply = client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=6)
        assert [choice.text for choice in reply.choices] == expected
        assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.object == "text_completion"
    [single] = client.completions.create(model=NAME, prompt=ids[0], temperature=0, max_tokens=6).choices
    assert (single.text, single.finish_reason) == (expected[0], "length")
    streamed = [""] * 2
    for chunk in client.completions.create(
        model=NAME, prompt=texts, temperature=0, max_tokens=6, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected


def test_logprobs_give_each_token_and_its_alternatives(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": ASK, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert (
        bytes(b for entry in logprobs.content for b in entry.bytes or []).decode()
        == whole.choices[0].message.content
    )
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the likeliest
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    plain = client.completions.create(
        model=NAME, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    )
    legacy = plain.choices[0].logprobs
    assert "".join(legacy.tokens) == plain.choices[0].text
    assert legacy.text_offset == [len("".join(legacy.tokens[:i])) for i in range(4)]
    assert all(len(top) == 2 for top in legacy.top_logprobs)


def test_n_choices_differ_and_are_reproducible_by_seed(client: openai.OpenAI) -> None:
    def ask(seed: int, **more: Any) -> list[str | None]:
        reply = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=seed,
            temperature=1.2,
            max_tokens=6,
            **more,
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.completion_tokens == 18
        return [choice.message.content for choice in reply.choices]

    first = ask(7)
    assert len(set(first)) == 3
    assert ask(7) == first
    assert ask(8) != first
    assert ask(7, user="somebody") == first


def test_stop_strings_end_the_reply(real_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "1 2 3 4 5 6 7 8", "temperature": 0, "max_tokens": 16}
    free = real_client.completions.create(**options).choices[0]
    assert " 12" in free.text
    stopped = real_client.completions.create(**options, stop=[" 12", "zebra"]).choices[0]
    assert stopped.text == free.text.split(" 12")[0]
    assert stopped.finish_reason == "stop"
    one = real_client.completions.create(
        **options, stop=" 12", extra_body={"include_stop_str_in_output": True}
    )
    assert one.choices[0].text == stopped.text + " 12"


def test_extra_sampling_fields_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "Once upon a time"
    fields: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "min_tokens": 4,
        "ignore_eos": True,
        "priority": -2,
    }
    shared: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "seed": 3,
        "max_tokens": 16,
    }
    reply = client.completions.create(model=NAME, prompt=prompt, **shared, extra_body=fields)
    [expected] = llm.generate([prompt], SamplingParams(**shared, **fields), use_tqdm=False)
    assert reply.choices[0].text == expected.outputs[0].text
    [forbidden] = llm.encode(" Paris")
    france = "The capital of France is"
    biased = client.completions.create(
        model=NAME, prompt=france, temperature=0, max_tokens=2, logit_bias={str(forbidden): -100}
    )
    assert "Paris" not in biased.choices[0].text


def test_a_json_schema_is_enforced(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
        reply = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=wanted,
            max_tokens=60,
            **options,
        )
        person = json.loads(reply.choices[0].message.content or "")
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 120
        assert reply.choices[0].finish_reason == "stop"


def test_a_json_object_is_enforced(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "A JSON object with one key."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=24,
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
    else:
        assert (reply.choices[0].message.content or "").lstrip().startswith("{")


def test_a_tool_call_comes_back_parsed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 100,
    }
    reply = client.chat.completions.create(**options)
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None

    name, text, finish = "", "", None
    for chunk in client.chat.completions.create(**options, stream=True):
        [choice] = chunk.choices
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            assert delta.index == 0
            assert delta.function is not None
            name += delta.function.name or ""
            text += delta.function.arguments or ""
    assert (name, json.loads(text), finish) == ("get_weather", arguments, "tool_calls")

    answer = client.chat.completions.create(
        model=NAME,
        messages=[
            *options["messages"],
            reply.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "It is 7 degrees and raining in Oslo."},
        ],
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].message.content


def test_tools_are_in_the_prompt_and_required_forces_a_call(client: openai.OpenAI) -> None:
    other: Any = {
        "type": "function",
        "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}},
    }
    options: dict[str, Any] = {"model": NAME, "messages": ASK, "max_tokens": 1}
    plain = client.chat.completions.create(**options)
    shown = client.chat.completions.create(**options, tools=[WEATHER, other])
    hidden = client.chat.completions.create(**options, tools=[WEATHER, other], tool_choice="none")
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens + 40
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens
    forced = client.chat.completions.create(
        model=NAME,
        messages=ASK,
        tools=[WEATHER, other],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    calls = forced.choices[0].message.tool_calls or []
    assert calls
    assert {call.function.name for call in calls} <= {"get_weather", "ping"}


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "skim"


# -- every error class of the client that the server can cause


def test_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=NAME, messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="window") as caught:
        client.completions.create(model=NAME, prompt="word " * 9000)
    assert caught.value.code == "context_length_exceeded"


def test_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4") as caught:
        client.chat.completions.create(model="gpt-4", messages=ASK)
    assert caught.value.code == "model_not_found"


def test_wrong_keys(llm: LLM) -> None:
    with LiveServer(llm, api_key="right", admin_key="root") as server:
        with connect(server, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with connect(server, api_key="right") as right:
            assert right.models.list().data
            with pytest.raises(openai.PermissionDeniedError):
                right.get(f"{server.url}/admin/stats", cast_to=object)


def test_the_rate_limit_error_says_when_to_retry(llm: LLM) -> None:
    with LiveServer(llm, max_queued_requests=0) as server, connect(server) as client:
        many: dict[str, Any] = {"model": NAME, "prompt": ["a"] * 16, "n": 4, "max_tokens": 50}
        with client.completions.create(**many, stream=True) as running:
            next(iter(running))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=NAME, prompt="a", max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        deadline = time.monotonic() + 30
        while server.service._running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices


def test_server_and_client_timeouts(llm: LLM) -> None:
    with LiveServer(llm, request_timeout=0.3) as server, connect(server) as client:
        long: dict[str, Any] = {
            "model": NAME,
            "messages": ASK,
            "max_tokens": 2000,
            "extra_body": {"ignore_eos": True},
        }
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**long)
        assert caught.value.status_code == 408
        with pytest.raises(openai.APIError, match="longer than"):
            list(client.chat.completions.create(**long, stream=True))
    impatient, late = httpx.Timeout(0.2), pytest.raises(openai.APITimeoutError)
    with LiveServer(llm) as server, connect(server, timeout=impatient) as client, late:
        client.chat.completions.create(**long)


def test_a_loading_server_is_an_internal_error_with_retry_after() -> None:
    with LiveServer(None) as server, connect(server) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=NAME, messages=ASK)
        assert caught.value.status_code == 503
        assert "retry-after" in caught.value.response.headers


def test_no_server_is_a_connection_error(llm: LLM) -> None:
    with LiveServer(llm) as server:
        pass
    with connect(server) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()
