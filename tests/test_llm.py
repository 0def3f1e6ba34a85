"""The offline API on a small model with the default's tokenizer and, under `slow`, on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from skim import LLM, SamplingParams
from skim.config import EngineConfig, PrefillConfig
from skim.engine.engine import Engine
from skim.engine.sequence import Delta
from skim.errors import ConfigError, RequestError
from skim.models.load import load
from tests.fake import submit
from tests.models.quantized.restored import restored_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "List three colours:\n1.",
    "The quick brown fox",
    "In 1969, the first person to walk on the Moon was Neil Armstrong. Question: who walked on the Moon?",
    "A haiku about autumn:\n",
]
TOKENS = 32  # every request fills a block and uses the next
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(
    scope="module", params=["sketch_dir", pytest.param("default_model_dir", marks=pytest.mark.slow)]
)
def model_dir(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def llm(model_dir: Path, expected: list[list[int]]) -> Iterator[LLM]:
    with LLM(model_dir, progress=False, kv_memory="1G", max_num_batched_tokens=64) as llm:
        assert llm.model_path == model_dir
        yield llm


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """The output of transformers' `generate`: greedy tokens for each prompt.

    It runs before the engine and in a thread that ends, so that their OpenMP workers do not run together.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(generate_with_transformers, model_dir).result()


def generate_with_transformers(path: Path) -> list[list[int]]:
    model = restored_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return out[:, -TOKENS:].tolist()  # type: ignore[no-any-return]


def test_greedy_text_equals_transformers_generate_alone(llm: LLM, expected: list[list[int]]) -> None:
    for prompt, tokens in list(zip(PROMPTS, expected, strict=True))[:3]:  # the batch has them all
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == tokens
        assert output.outputs[0].text == llm.tokenizer.decode(tokens, skip_special_tokens=True)


def test_greedy_text_equals_transformers_generate_in_a_batch_admitted_at_different_steps(
    llm: LLM, expected: list[list[int]]
) -> None:
    engine = Engine(
        llm.engine.model, llm.config
    )  # stepped by the test, so that requests arrive at known steps
    handles = []
    for prompt in PROMPTS:
        handles.append(submit(engine, llm.tokenizer.encode(prompt), GREEDY))
        for _ in range(3):
            engine.step()
    assert engine.stats().running == len(PROMPTS)
    while engine.step():
        pass
    engine.core.memory.check()
    for handle, tokens in zip(handles, expected, strict=True):
        assert [t for e in handle if isinstance(e, Delta) for t in e.token_ids] == tokens


def test_preemption_in_a_small_pool_gives_the_same_text(llm: LLM, expected: list[list[int]]) -> None:
    block_bytes = llm.stats().pool.block_bytes
    config = EngineConfig.of(kv_memory=8 * block_bytes, max_num_batched_tokens=64)
    engine = Engine(llm.engine.model, config)
    handles = [submit(engine, llm.tokenizer.encode(prompt), GREEDY) for prompt in PROMPTS]
    while engine.step():
        engine.core.memory.check()
    assert engine.stats().preemptions > 0
    for handle, tokens in zip(handles, expected, strict=True):
        assert [t for e in handle if isinstance(e, Delta) for t in e.token_ids] == tokens


@pytest.fixture(scope="module")
def default(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(progress=False, kv_memory="1G") as llm:
        assert llm.model_path == default_model_dir
        yield llm


def test_chat_answers_and_reports_metrics(default: LLM) -> None:
    llm = default
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [first] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert "Paris" in first.outputs[0].text
    assert first.outputs[0].finish_reason == "stop"
    assert first.prompt is not None
    assert first.prompt.endswith("<|im_start|>assistant\n")
    [second] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert second.outputs[0].text == first.outputs[0].text
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens - 16
    assert second.metrics.prompt_tokens == len(second.prompt_token_ids)


def test_a_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=16)
    other = SamplingParams(temperature=1.0, max_tokens=16, repetition_penalty=1.2)
    alone = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids
    batch = llm.generate(PROMPTS[:4], [other, params, other, other], use_tqdm=False)
    assert batch[1].outputs[0].token_ids == alone
    different = SamplingParams(temperature=1.0, top_p=0.95, seed=8, max_tokens=16)
    assert llm.generate(PROMPTS[1], different, use_tqdm=False)[0].outputs[0].token_ids != alone


def test_n_logprobs_and_stop_strings(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=3, max_tokens=12, logprobs=4, ignore_eos=True)
    [output] = llm.generate("The weather today is", params, use_tqdm=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in output.outputs}) == 3
    for one in output.outputs:
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids) == 12
        for token, entry in zip(one.token_ids, one.logprobs, strict=True):
            assert entry.token_id == token
            assert entry.logprob <= 0
            assert len(entry.top) == 4
            assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))
    greedy = llm.generate(
        "Count: one, two, three,", SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
    )
    text = greedy[0].outputs[0].text
    stop = text[5:9]
    params = SamplingParams(temperature=0, max_tokens=16, stop=[stop])
    [stopped] = llm.generate("Count: one, two, three,", params, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop


def test_logprobs_equal_those_of_transformers(llm: LLM, model_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    model = restored_model(model_dir)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    assert output.outputs[0].logprobs is not None
    for step, entry in enumerate(output.outputs[0].logprobs):
        at = expected[len(output.prompt_token_ids) + step - 1]
        assert entry.logprob == pytest.approx(float(at[entry.token_id]), abs=1e-3)
        assert [token for token, _ in entry.top] == at.topk(3).indices.tolist()


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=3)
    [by_text] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    for form in (ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.array(ids)], iter([ids])):
        [by_ids] = llm.generate(form, params, use_tqdm=False)
        assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
        assert by_ids.prompt is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([""]), "prompt is empty"),
        (lambda llm: llm.generate([[]]), "prompt is empty"),
        (lambda llm: llm.generate("word " * 9000), "window of 8192"),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "1 sampling parameters.*2 prompts"),
        (lambda llm: llm.generate(["a", ""]), "prompt 1: the prompt is empty"),
        (lambda llm: llm.generate(None), "got NoneType"),
        (lambda llm: llm.generate(5), "got int"),
        (lambda llm: llm.generate(b"abc"), "got bytes"),
        (lambda llm: llm.generate({"prompt": "hi"}), "got dict"),
        (lambda llm: llm.generate([None]), "prompt 0 must be a text or a list of token ids"),
        (lambda llm: llm.generate(["a", [1, "b"]]), "prompt 1 must be"),
        (lambda llm: llm.generate("\ud800"), "not valid text"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "params must be SamplingParams"),
        (lambda llm: llm.generate(["a"], [None]), "params must be SamplingParams"),
        (lambda llm: llm.generate("a", prefill={"scorer": "full"}), "prefill must be a PrefillConfig"),
        (lambda llm: llm.chat([{"role": "user"}], prefill="auto"), "prefill must be a PrefillConfig"),
        (
            lambda llm: llm.generate("a", prefill=PrefillConfig(drafter="other")),
            "drafter 'other' is not loaded.*set it at start",
        ),
        (lambda llm: llm.chat({"role": "user", "content": "hi"}), "messages must be a list"),
        (lambda llm: llm.chat("hello"), "messages must be a list"),
        (lambda llm: llm.chat([]), "messages is empty"),
        (lambda llm: llm.chat([[]]), "messages is empty"),
        (lambda llm: llm.chat([{"role": "user"}]), "chat template refused"),
        (lambda llm: llm.generate("x", SamplingParams(logit_bias={10**6: 1.0})), "1000000"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_running(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(llm)
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.generate(None), "prompts"),
        (lambda llm: llm.generate([None]), "prompts"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "params"),
        (lambda llm: llm.generate("a", [SamplingParams()] * 2), "params"),
        (lambda llm: llm.generate("a", prefill={"scorer": "full"}), "prefill"),
        (lambda llm: llm.generate("a", prefill=PrefillConfig(drafter="other")), "drafter"),
        (lambda llm: llm.chat("hello"), "messages"),
        (lambda llm: llm.chat([]), "messages"),
        (lambda llm: llm.chat([[]]), "messages"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages"),
    ],
)
def test_a_refusal_carries_the_argument_or_setting_it_is_about(llm: LLM, call: Any, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        call(llm)
    assert raised.value.fields == (field,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "1K"}, "holds no block"),
        ({"block_size": 0}, "block_size must be.*got 0"),
        ({"max_model_len": 10**6}, "max_model_len 1000000 is beyond the context window"),
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
    ],
)
def test_bad_settings_are_refused(sketch_dir: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(progress=False, **settings)


def test_loading_a_model_twice_gives_the_same_model(llm: LLM, model_dir: Path) -> None:
    again = load(model_dir, llm.config.model)
    assert again.layers == llm.engine.model.layers
    assert again.eos_token_ids == llm.engine.model.eos_token_ids


def test_settings_of_a_drafter_that_is_not_there_are_named(
    sketch_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(sketch_dir, progress=False, kv_memory="16M", drafter_quantization="int8"):
        assert "drafter_quantization have no effect without a drafter" in caplog.text
