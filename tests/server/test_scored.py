"""Prompts in the reply (echo, logprobs), and the other fields of completions, on a live server.

The plain twin of every figure is one forward of transformers over the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import torch

from skim import LLM
from skim.sampling.logprobs import PromptLogprobs
from skim.server.echo import best, offsets_in, top_by_text
from skim.server.fill_in import FORMS, encode_middle, middle_tokens
from skim.server.tokens import TokenTexts
from tests import tiny
from tests.live import NAME, LiveServer, eventually

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
CLOSE = 2e-5


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, progress=False, kv_memory="8M", max_num_batched_tokens=24) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    limits = {"max_n": 4, "max_prompts": 6, "max_logit_bias": 5, "max_prompt_logprobs": 3000}
    with LiveServer(llm, **limits) as server, server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left_running(llm: LLM) -> Iterator[None]:
    yield
    eventually(lambda: llm.stats().running == llm.stats().waiting == 0)


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post(COMPLETE, json={"model": NAME, "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def refused(http: httpx.Client, route: str = COMPLETE, **fields: Any) -> dict[str, Any]:
    base = {"prompt": "hello"} if route == COMPLETE else {"messages": [{"role": "user", "content": "hi"}]}
    reply = http.post(route, json={"model": NAME, "max_tokens": 2, **base, **fields})
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", COMPLETE, json={"model": NAME, "stream": True, **fields}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def forward(module: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(module(torch.tensor([ids])).logits[0].float(), dim=-1)


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.encode(text))


def check_prompt(logprobs: dict[str, Any], llm: LLM, module: Any, ids: list[int], top: int) -> None:
    """The first entries of `logprobs` are those of the prompt."""
    expected = forward(module, ids)[:-1]
    texts = TokenTexts(llm.tokenizer)
    count = len(ids)
    assert logprobs["tokens"][:count] == [texts.text(token) for token in ids]
    assert logprobs["token_logprobs"][0] is None
    values = [row[token].item() for row, token in zip(expected, ids[1:], strict=True)]
    assert logprobs["token_logprobs"][1:count] == pytest.approx(values, abs=CLOSE)
    if top == 0:
        assert logprobs["top_logprobs"] is None
        return
    assert logprobs["top_logprobs"][0] is None
    for found, row, own in zip(logprobs["top_logprobs"][1:count], expected, ids[1:], strict=True):
        likely, tokens = row.topk(top)
        wanted = {texts.text(int(token)): float(value) for token, value in zip(tokens, likely, strict=True)}
        wanted.setdefault(texts.text(own), float(row[own]))  # the prompt's token, likely or not
        assert found == pytest.approx(wanted, abs=CLOSE)


# -- echo and logprobs


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_is_scored(
    http: httpx.Client, llm: LLM, reference: Any, top: int, max_tokens: int, as_ids: bool
) -> None:
    text = "The quick brown fox, 12 € 3 — naïve."
    ids = ids_of(llm, text)
    prompt = ids if as_ids else text
    reply = complete(http, prompt=prompt, echo=True, logprobs=top, max_tokens=max_tokens)
    [choice] = reply["choices"]
    logprobs = choice["logprobs"]
    check_prompt(logprobs, llm, reference, ids, top)
    assert choice["text"].startswith(text)
    assert choice["finish_reason"] == "length"
    assert "prompt_logprobs" not in choice
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert {len(entries) for entries in logprobs.values() if entries is not None} == {len(ids) + max_tokens}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, start in zip(logprobs["tokens"][: len(ids)], offsets, strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, start)
    if max_tokens == 0:
        assert choice["text"] == text


def test_several_prompts_and_choices_each_have_their_own(
    http: httpx.Client, llm: LLM, reference: Any
) -> None:
    prompts = [ids_of(llm, text) for text in ("one", "a longer one, in chunks of tokens", "x")]
    reply = complete(http, prompt=prompts, echo=True, logprobs=2, max_tokens=2, n=2, temperature=0.9, seed=3)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for index, choice in enumerate(reply["choices"]):
        check_prompt(choice["logprobs"], llm, reference, prompts[index // 2], 2)


def test_a_stream_begins_with_the_prompt(http: httpx.Client, llm: LLM, reference: Any) -> None:
    fields = {"prompt": ["hello", "good day"], "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
    for max_tokens in (0, 3):
        whole = complete(http, **fields, max_tokens=max_tokens)["choices"]
        texts = [""] * 4
        logprobs: list[dict[str, list[Any]]] = [{} for _ in range(4)]
        for chunk in chunks(http, **fields, max_tokens=max_tokens):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                for name, entries in (choice["logprobs"] or {}).items():
                    logprobs[choice["index"]].setdefault(name, []).extend(entries)
        assert texts == [choice["text"] for choice in whole]
        assert [one["tokens"] for one in logprobs] == [choice["logprobs"]["tokens"] for choice in whole]
        assert [one["text_offset"] for one in logprobs] == [c["logprobs"]["text_offset"] for c in whole]
        check_prompt(logprobs[3], llm, reference, ids_of(llm, "good day"), 1)


def test_echo_without_logprobs_computes_none(http: httpx.Client, llm: LLM) -> None:
    before = llm.stats().prompt_tokens_reported
    [choice] = complete(http, prompt="just text", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("just text", None)
    assert llm.stats().prompt_tokens_reported == before


def test_twenty_items_as_an_evaluation_harness_sends_them(
    http: httpx.Client, llm: LLM, reference: Any
) -> None:
    """Batches of token ids, one generated token that is dropped, and sums over the continuation."""
    items = [(f"Item {i}: the answer is", f" {'abc'[i % 3] * (1 + i % 4)}") for i in range(20)]
    greedy = complete(http, prompt="Item 20: the answer is", max_tokens=1, logprobs=0)["choices"][0]
    encoded = [(ids_of(llm, context), ids_of(llm, rest)) for context, rest in items]
    last = ids_of(llm, "Item 20: the answer is")
    encoded.append((last, [int(forward(reference, last)[-1].argmax())]))
    assert greedy["logprobs"]["token_logprobs"] == pytest.approx([float(forward(reference, last)[-1].max())])
    for start in range(0, len(encoded), 6):
        batch = encoded[start : start + 6]
        reply = complete(
            http,
            prompt=[[*context, *rest] for context, rest in batch],
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
        for choice, (context, rest) in zip(reply["choices"], batch, strict=True):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            rows = forward(reference, [*context, *rest])[len(context) - 1 : -1]
            expected = [row[token].item() for row, token in zip(rows, rest, strict=True)]
            assert values == pytest.approx(expected, abs=CLOSE)
            is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            assert is_greedy == (rows.argmax(dim=-1).tolist() == rest)
            assert is_greedy or context is not last


# -- vLLM's prompt_logprobs


def check_ranked(found: list[Any], module: Any, llm: LLM, ids: list[int], top: int) -> None:
    assert found[0] is None
    assert len(found) == len(ids)
    for entry, row, token in zip(found[1:], forward(module, ids), ids[1:], strict=False):
        order = row.sort(descending=True, stable=True).indices.tolist()
        assert set(map(int, entry)) == {*order[:top], token}
        for key, value in entry.items():
            assert value["logprob"] == pytest.approx(row[int(key)].item(), abs=CLOSE)
            assert value["rank"] == order.index(int(key)) + 1
            assert value["decoded_token"] == TokenTexts(llm.tokenizer).text(int(key))


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_of_completions(
    http: httpx.Client, llm: LLM, reference: Any, max_tokens: int
) -> None:
    [choice] = complete(http, prompt="hello there", prompt_logprobs=3, max_tokens=max_tokens)["choices"]
    check_ranked(choice["prompt_logprobs"], reference, llm, ids_of(llm, "hello there"), 3)
    assert choice["logprobs"] is None
    assert not choice["text"].startswith("hello")


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_of_chats(http: httpx.Client, llm: LLM, reference: Any, max_tokens: int) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": NAME, "messages": messages, "prompt_logprobs": 2, "max_tokens": max_tokens, "n": 2}
    reply = http.post(CHAT, json=body).json()
    check_ranked(reply["prompt_logprobs"], reference, llm, list(llm.encode_chat(messages).tokens), 2)
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
    body.pop("prompt_logprobs")
    if max_tokens:
        assert "prompt_logprobs" not in http.post(CHAT, json=body).json()


def test_a_scored_prompt_is_not_skimmed_and_the_report_says_so(http: httpx.Client) -> None:
    fields = {"prompt": "word " * 100, "max_tokens": 1, "skim": {"sparse_prefill": "always"}}
    skim = complete(http, **fields, prompt_logprobs=0)["skim"]
    assert (skim["fallback"], skim["kept_tokens"], skim["cached_tokens"]) == ("prompt_logprobs", 500, 0)


# -- best_of


def test_best_of_returns_the_likeliest(http: httpx.Client) -> None:
    """By their means over the tokens: of sequences with several lengths, sums would prefer the short ones."""
    fields = {"prompt": ["once", "twice"], "temperature": 1.5, "seed": 5, "max_tokens": 6}
    fields |= {"logit_bias": {"257": 4}}  # the end of a text becomes likely
    drawn = complete(http, **fields, n=4, logprobs=0)["choices"]
    kept = complete(http, **fields, n=2, best_of=4)
    means = [fmean(choice["logprobs"]["token_logprobs"]) for choice in drawn]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in drawn]
    assert (len(set(means)), len(set(lengths)) > 1) == (8, True)
    expected = [drawn[prompt * 4 + i]["text"] for prompt in (0, 1) for i in best(means[prompt * 4 :][:4], 2)]
    assert [choice["text"] for choice in kept["choices"]] == expected
    assert [choice["index"] for choice in kept["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in kept["choices"])
    assert kept["usage"]["completion_tokens"] == sum(lengths)


def test_best_is_stable() -> None:
    assert best([-1.0, -3.0, -1.0, -0.5], 3) == [3, 0, 2]


# -- the other fields


def test_a_prompt_is_truncated_on_the_left(http: httpx.Client, llm: LLM) -> None:
    text = "".join(chr(97 + i % 26) for i in range(300))
    fields = {"echo": True, "max_tokens": 4}
    reply = complete(http, prompt=text, truncate_prompt_tokens=10, **fields)
    assert reply["usage"]["prompt_tokens"] == 10
    assert reply["choices"][0]["text"].startswith(text[-10:])
    assert complete(http, prompt="abc", truncate_prompt_tokens=10, **fields)["usage"]["prompt_tokens"] == 3
    long = complete(http, prompt=text * 10, truncate_prompt_tokens=-1, max_tokens=4)
    window = llm.engine.core.max_model_len
    assert long["usage"]["prompt_tokens"] == window - 4
    body = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 7, "max_tokens": 1}
    assert http.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == 7


def test_only_allowed_tokens_are_sampled(http: httpx.Client, llm: LLM) -> None:
    allowed = ids_of(llm, "abc")
    [choice] = complete(http, prompt="x", allowed_token_ids=allowed, max_tokens=40, temperature=2.0, seed=1)[
        "choices"
    ]
    assert set(choice["text"]) == set("abc")


def test_bad_words_are_not_written(http: httpx.Client, llm: LLM) -> None:
    fields = {"prompt": "x", "max_tokens": 200, "temperature": 1.0, "seed": 2}
    fields["allowed_token_ids"] = ids_of(llm, "ab ")
    [free] = complete(http, **fields)["choices"]
    [held] = complete(http, **fields, bad_words=["aba", "bb"])["choices"]
    assert "aba" in free["text"]
    assert "bb" in free["text"]
    assert "aba" not in held["text"]
    assert "bb" not in held["text"]
    assert {"a", "b"} <= set(held["text"])


def test_masks_that_leave_nothing_are_the_clients_error(http: httpx.Client, llm: LLM) -> None:
    error = refused(http, allowed_token_ids=ids_of(llm, "a"), bad_words=["a"])
    assert "no token is left" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": "x" * 200}, "prompt_logprobs"),
        ({"logprobs": 5, "echo": True, "prompt": "x" * 200, "n": 4}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 5}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": "end", "echo": True}, "echo"),
        ({"suffix": "end", "prompt": [1, 2]}, "suffix"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 2, 3, 4, 5, 6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"prompt": ["a"] * 7}, "prompt"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = refused(http, **fields)
    assert error["param"].split("[")[0].split(".")[0] == param, error


@pytest.mark.parametrize("name", ["best_of", "echo", "suffix"])
def test_chats_have_no_fields_of_completions(http: httpx.Client, name: str) -> None:
    assert refused(http, CHAT, **{name: 2})["param"] == name


# -- pure parts


class ManyForms:
    """A tokenizer that knows one form of fill-in-the-middle tokens."""

    unk_token_id = 0

    def __init__(self, form: tuple[str, str, str]) -> None:
        self._ids = {token: 7 + place for place, token in enumerate(form)}

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self._ids.get(token, 0) for token in tokens]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_middle_tokens_is_found(form: tuple[str, str, str]) -> None:
    assert middle_tokens(ManyForms(form)) == (7, 8, 9)
    assert middle_tokens(ManyForms(("<a>", "<b>", "<c>"))) is None


def test_a_middle_is_filled_in_by_a_model_that_can(path: Path, tmp_path: Path) -> None:
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    module, tokenizer = tiny.build("llama"), tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    module.resize_token_embeddings(len(tokenizer))
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    first, second, third = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    with LLM(tmp_path, progress=False, kv_memory="8M") as llm, LiveServer(llm) as server:
        left, right = ids_of(llm, "def f("), ids_of(llm, "return 1")
        expected = (first, *left, second, *right, third)
        assert encode_middle(llm, "def f(", "return 1").tokens == expected
        with server.client() as http:
            fields = {"max_tokens": 5, "temperature": 0}
            filled = complete(http, prompt="def f(", suffix="return 1", **fields)
            assert filled["usage"]["prompt_tokens"] == len(expected)
            same = complete(http, prompt=list(expected), **fields)
            assert filled["choices"][0]["text"] == same["choices"][0]["text"]


def test_offsets_skip_tokens_that_are_not_in_the_text(llm: LLM) -> None:
    texts = TokenTexts(llm.tokenizer)
    ids = [256, *ids_of(llm, "aé"), 257, *ids_of(llm, "b")]
    assert offsets_in("aéb", ids, texts) == [0, 0, 1, 1, 2, 2]
    assert offsets_in("aé</s>b", ids, texts) == [0, 0, 1, 1, 2, 6]


def test_of_tokens_with_one_text_the_likeliest_counts(llm: LLM) -> None:
    found = PromptLogprobs((1, 2), 2)
    values = torch.tensor([-3.0, -0.5, -2.0]).view(torch.int32)
    row = torch.tensor([[1, 0, 300, 301, 0, 0]], dtype=torch.int32)  # ids beyond the vocabulary have no text
    row[0, 1], row[0, 4], row[0, 5] = values[0], values[1], values[2]
    assert found.add(row)
    _, entry = found
    assert entry is not None
    texts = TokenTexts(llm.tokenizer)
    assert top_by_text(entry, texts) == {"": -0.5, texts.text(2): -3.0}
    assert top_by_text(replace(entry, token_id=302), texts) == {"": -0.5}
