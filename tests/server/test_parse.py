"""Bodies made to be slow: refused at once, in little memory, while the server answers others."""

from __future__ import annotations

import json
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim import LLM
from skim.config import ServerConfig
from skim.server.errors import ApiError
from skim.server.parse import OBJECT_VALUES, has_more_values, parse_body
from skim.server.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from tests import tiny
from tests.live import NAME, LiveServer

MB = 2**20
COMPLETE = "/v1/completions"
JSON = {"content-type": "application/json"}


def values(value: Any) -> int:
    """The number of values as `has_more_values` counts them, for a value whose containers are not empty."""
    if isinstance(value, dict):
        return OBJECT_VALUES + len(value) - 1 + sum(map(values, value.values()))
    if isinstance(value, list):
        return len(value) + sum(map(values, value))
    return 0


texts = st.text(alphabet='a,:{["\\\n\u00e9\U0001f642', max_size=8)
leaves = st.none() | st.booleans() | st.integers() | texts
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=5) | st.dictionaries(texts, inner, min_size=1, max_size=5)
    ),
    max_leaves=30,
)


@given(value=nested, ascii_only=st.booleans(), cut=st.integers(1, 9))
def test_values_are_counted_exactly_whatever_the_strings_hold(value: Any, ascii_only: bool, cut: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skim.server.parse._SLICE", cut)  # slices end anywhere
        assert not has_more_values(raw, count)
        if count:
            assert has_more_values(raw, count - 1)


def many(field: str, item: str, megabytes: float = 15, model: str = '"model": "m", "prompt": "a"') -> bytes:
    count = int(megabytes * MB / (len(item) + 1))
    return f'{{{model}, "{field}": [{",".join([item] * count)}]}}'.encode()


PART = '{"type":"text","text":"a"}'
CHAT = '"model": "m", "messages": [{"role": "user", "content": "a"}]'
PARTS = '{"model":"m","messages":[{"role":"user","content":[' + ",".join([PART] * 570_000) + "]}]}"
BIAS = '{"model":"m","prompt":"a","logit_bias":{' + ",".join(f'"x{i}":1' for i in range(50_000)) + "}}"
NAMES = ",".join(f'"x{i}":1' for i in range(90_000))
UNKNOWN = '{"model":"m","prompt":"a","n":0,' + NAMES + "}"
OWN = '{"model":"m","prompt":"a","skim":{' + NAMES + "}}"
ATTACKS = {
    "stop": (CompletionRequest, lambda: many("stop", '""')),
    "fewer stops": (CompletionRequest, lambda: many("stop", '""', 2.5)),
    "stop ids": (CompletionRequest, lambda: many("stop_token_ids", "-1")),
    "token ids": (CompletionRequest, lambda: many("prompt", "-1", model='"model": "m"')),
    "parts": (ChatRequest, PARTS.encode),
    "bias": (CompletionRequest, BIAS.encode),
    "unknown fields": (CompletionRequest, UNKNOWN.encode),
    "unknown options": (CompletionRequest, OWN.encode),
    "messages": (ChatRequest, lambda: many("messages", "{}", 0.1, '"model": "m"')),
    "tools": (ChatRequest, lambda: many("tools", '{"x":1}', 0.2, CHAT)),
    "detokenize": (DetokenizeRequest, lambda: many("tokens", "-1", model='"model": "m"')),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_body_of_mistakes_is_refused_in_memory_like_its_size(name: str) -> None:
    model, make = ATTACKS[name]
    raw = make()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            parse_body(model, raw, ServerConfig())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.status == 400
    assert len(refused.value.message) < 400
    assert peak < 16 * MB + 2 * len(raw), f"{peak / MB:.0f} MB for a body of {len(raw) / MB:.1f} MB"


@pytest.mark.parametrize("half", ["\\ud800", "\\ud800x", "\\udfff x", "\\ud800\\u0041"])
def test_half_of_a_surrogate_pair_is_explained(half: str) -> None:
    with pytest.raises(ApiError, match=r"not valid JSON: .* must be one of a pair"):
        parse_body(CompletionRequest, f'{{"prompt": "a{half}"}}'.encode(), ServerConfig())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": ["a"] * 17}, "stop_token_ids"),
        ({"logit_bias": {f"x{i}": 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_a_length_is_checked_before_the_items(body: dict[str, Any], param: str) -> None:
    raw = json.dumps({"model": "m", "prompt": "a", **body}).encode()
    with pytest.raises(ApiError, match="at most") as refused:
        parse_body(CompletionRequest, raw, ServerConfig())
    assert refused.value.param == param


def test_of_many_unknown_fields_few_are_named_and_known_ones_are_still_checked() -> None:
    many = {f"x{i}": 1 for i in range(1000)}
    body, ignored = parse_body(
        CompletionRequest, json.dumps({"prompt": "a", **many}).encode(), ServerConfig()
    )
    assert body.prompt == "a"
    assert ignored == {f"x{i}" for i in range(32)}
    with pytest.raises(ApiError, match=r"skim\.x0 is not supported"):
        parse_body(CompletionRequest, json.dumps({"prompt": "a", "skim": many}).encode(), ServerConfig())
    for name, reason in (
        ("keepRatio", ": did you mean keep_ratio?"),
        ("k" * 10**6, "; GET /docs lists the fields"),
    ):
        with pytest.raises(ApiError) as refused:
            parse_body(
                CompletionRequest, json.dumps({"prompt": "a", "skim": {name: 1}}).encode(), ServerConfig()
            )
        assert refused.value.message.endswith(f" is not supported{reason}")
        assert refused.value.code == "unsupported_parameter"
        assert str(refused.value.param).startswith(f"skim.{name[:20]}")
    form = {"type": "json_schema", "json_schema": {"name": "n"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": form}
    with pytest.raises(ApiError, match="schema is required") as refused:
        parse_body(ChatRequest, json.dumps(body).encode(), ServerConfig())
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm, LiveServer(llm) as server:
        yield server


class Pulse(threading.Thread):
    """A client that asks for `/health` over and over and keeps the longest time of an answer."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__()
        self.longest, self.answers = 0.0, 0
        self._server, self._stop_asking = server, threading.Event()

    def run(self) -> None:
        with self._server.client() as http:
            while not self._stop_asking.is_set():
                began = time.perf_counter()
                assert http.get("/health").status_code == 200
                self.longest = max(self.longest, time.perf_counter() - began)
                self.answers += 1
                time.sleep(0.005)

    def stop(self) -> None:
        self._stop_asking.set()
        self.join(60)


def test_others_are_answered_while_four_bodies_of_mistakes_are_checked(server: LiveServer) -> None:
    raw = many("stop", '""')
    before = psutil.Process().memory_info().rss
    pulse = Pulse(server)
    pulse.start()
    replies: list[httpx.Response] = []

    def attack() -> None:
        with server.client() as http:
            replies.append(http.post(COMPLETE, content=raw, headers=JSON))

    attackers = [threading.Thread(target=attack) for _ in range(4)]
    for thread in attackers:
        thread.start()
    for thread in attackers:
        thread.join(60)
    pulse.stop()
    assert [reply.status_code for reply in replies] == [400] * 4
    assert pulse.answers > 5
    assert psutil.Process().memory_info().rss < before + 400 * MB, "memory does not return"
    assert pulse.longest < 10, "another client waited for the bodies of others"
    with server.client() as http:
        body = {"model": NAME, "prompt": "a", "max_tokens": 1}
        assert http.post(COMPLETE, json=body).status_code == 200


BAD_SHAPES = [
    ({"skim": "x"}, "skim must be an object with options, got 'x'"),
    ({"skim": [1]}, "skim must be an object with options, got [1]"),
    ({"stream_options": "x"}, "stream_options must be an object, got 'x'"),
    ({"prompt": 5}, "prompt must be a valid string or a valid list, got 5"),
    ({"truncate_prompt_tokens": "x"}, "truncate_prompt_tokens must be -1 or a valid integer, got 'x'"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or greater than or equal to 1, got 0"),
    ({"response_format": {}}, "response_format.type is required"),
    ({"temperature": -1}, "temperature must be greater than or equal to 0, got -1"),
    ({"prompt": []}, "prompt must have at least 1 item, got []"),
    ({"response_format": {"type": "xml"}}, "response_format.type must be one of 'text', "),
    ({"skim": {"scorer": "none"}}, "skim.scorer must be one of blend, "),
    ({"skim": {"depth": 1}}, "skim.depth is not supported; GET /docs lists the fields"),
    (
        {"skim": {"drafter": "a"}},
        "skim.drafter is not supported: it is set when the server starts (--drafter)",
    ),
    ({"skim": {"port": 1}}, "skim.port is not supported: it is set when the server starts (--port)"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SHAPES, ids=str)
def test_a_wrong_value_is_named_with_what_it_must_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode(), ServerConfig())
    assert refused.value.message.startswith(message)
    assert re.fullmatch(r"[\w.]+", str(refused.value.param))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tool_choice": 5}, "tool_choice must be 'none', 'auto' or 'required' or an object, got 5"),
        ({"function_call": [1]}, "function_call must be 'none' or 'auto' or an object, got [1]"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
    ],
)
def test_all_shapes_of_a_choice_are_named(choice: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **choice}
    with pytest.raises(ApiError) as refused:
        parse_body(ChatRequest, json.dumps(body).encode(), ServerConfig())
    assert refused.value.message == message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \n", "the body is empty; send a JSON object"),
        (b"[1]", "the body must be an object, got [1]"),
    ],
)
def test_a_body_that_is_no_object_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(CompletionRequest, raw, ServerConfig())
    assert refused.value.message == message
