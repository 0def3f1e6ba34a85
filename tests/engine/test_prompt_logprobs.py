"""Log-probabilities of prompt tokens, compared with one forward of transformers."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.config import EngineConfig
from skim.engine import runner
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Finished
from skim.errors import EngineError, PromptTooLongError, RequestError
from skim.models.load import load
from skim.sampling.logprobs import PromptLogprobs, TokenLogprob
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import fake_engine, submit

CLOSE = 2e-5


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(path: Path, request: pytest.FixtureRequest) -> Engine:
    return make(path, **getattr(request, "param", {}))


def make(path: Path, *, blocks: int = 64, **settings: Any) -> Engine:
    """An engine of the tiny model with room for `blocks` blocks of 4 tokens. Its thread is not started."""
    settings = {"block_size": 4, "max_num_batched_tokens": 16, **settings}
    token_bytes = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
    config = EngineConfig.of(model=str(path), kv_memory=blocks * 4 * token_bytes, device="cpu", **settings)
    return Engine(load(path, config.model), config)


def expected(module: Any, ids: list[int], top: int) -> list[TokenLogprob]:
    """The plain twin: all logits of one forward."""
    with torch.inference_mode():
        logprobs = torch.log_softmax(module(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
    found = []
    for row, token in zip(logprobs, ids[1:], strict=True):
        order = row.sort(descending=True, stable=True).indices.tolist()
        best = tuple((one, row[one].item()) for one in order[:top])
        found.append(TokenLogprob(token, row[token].item(), best, order.index(token) + 1))
    return found


def check(found: PromptLogprobs | None, module: Any, ids: list[int], top: int) -> None:
    assert found is not None
    first, *others = found
    assert first is None
    assert len(found) == len(ids) == len(others) + 1
    for ours, theirs in zip(others, expected(module, ids, top), strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
        assert [one for one, _ in ours.top] == [one for one, _ in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=CLOSE)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(256) for i in range(length)]


def run(engine: Engine) -> None:
    while engine.step():
        engine.core.memory.check()


def assert_nothing_held(engine: Engine) -> None:
    pool = engine.stats().pool
    assert pool.live == pool.evictable


def events(handle: RequestHandle) -> list[Any]:
    return [handle.events.get() for _ in range(handle.events.qsize())]


def scored(handle: RequestHandle) -> tuple[PromptLogprobs | None, list[int], Finished]:
    """The prompt's log-probabilities, the first sequence's tokens, and the end."""
    *deltas, done = events(handle)
    assert isinstance(done, Finished), done
    carriers = [i for i, delta in enumerate(deltas) if delta.prompt_logprobs is not None]
    assert carriers in ([], [0])  # the first delta of all carries them
    tokens = [token for delta in deltas if delta.index == 0 for token in delta.token_ids]
    return deltas[0].prompt_logprobs, tokens, done


def params(top: int | None, max_tokens: int, **others: Any) -> SamplingParams:
    others = {"temperature": 0, "ignore_eos": True, **others}
    return SamplingParams(prompt_logprobs=top, max_tokens=max_tokens, **others)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_they_equal_one_forward_of_transformers_in_every_family(family: str, tmp_path: Path) -> None:
    engine = make(tiny.save(family, tmp_path), blocks=64)
    ids = prompt(70)
    handle = submit(engine, ids, params(5, 1))
    run(engine)
    check(scored(handle)[0], tiny.build(family), ids, 5)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_any_length_over_any_chunks(
    engine: Engine, reference: Any, length: int, max_tokens: int, top: int
) -> None:
    ids = prompt(length)
    handle = submit(engine, ids, params(top, max_tokens))
    run(engine)
    found, tokens, done = scored(handle)
    check(found, reference, ids, top)
    assert len(tokens) == done.metrics.generated_tokens == max_tokens
    assert_nothing_held(engine)


def test_logits_are_computed_in_pieces(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    plain = runner.report_prompt
    monkeypatch.setattr(runner, "PIECE", 3 * tiny.VOCAB + 1)
    monkeypatch.setattr(
        runner, "report_prompt", lambda logits, *others: (seen.append(len(logits)), plain(logits, *others))[1]
    )
    ids = prompt(34)
    handle = submit(engine, ids, params(2, 0))
    run(engine)
    check(scored(handle)[0], reference, ids, 2)
    assert seen == [3, 3, 3, 3, 3, 1, 3, 3, 3, 3, 3, 1, 1]  # chunks of 16, 16 and 2 tokens
    assert engine.stats().prompt_tokens_reported == 33


def test_a_cached_prefix_is_not_used_and_a_computed_one_is_shared(engine: Engine, reference: Any) -> None:
    ids = prompt(40)
    first = submit(engine, ids, params(None, 2))
    run(engine)
    second = submit(engine, ids, params(3, 2))
    run(engine)
    found, tokens, done = scored(second)
    check(found, reference, ids, 3)
    assert done.metrics.cached_tokens == 0
    assert engine.stats().prefix.bypasses == {"prompt_logprobs": 1}
    assert tokens == scored(first)[1]

    other = prompt(40, seed=1)
    submit(engine, other, params(3, 0))
    run(engine)
    third = submit(engine, other, params(None, 2))
    run(engine)
    assert scored(third)[2].metrics.cached_tokens == 39


def step_and_preempt(engine: Engine, draw: random.Random) -> bool:
    stepped = engine.step()
    engine.core.memory.check()
    if draw.random() < 0.15:
        engine.core._finish()
        running = [one for one in engine.core.lifecycle.sequences.values() if one.table is not None]
        if running:
            engine.core.lifecycle.preempt(draw.choice(running))
            engine.core.memory.check()
    return stepped


@pytest.mark.parametrize("seed", range(6))
def test_beside_others_with_preemption_and_aborts(path: Path, reference: Any, seed: int) -> None:
    """In a small pool, with requests that are also preempted at random, in prompts and in replies.

    Half of the engines launch a step while the one before is in flight, as on a GPU.
    """
    draw = random.Random(seed)
    engine = make(path, blocks=19, max_num_batched_tokens=draw.choice([5, 16, 40]))
    engine.core.overlaps = seed % 2 == 0
    lone = make(path, blocks=64)
    open_requests: list[tuple[RequestHandle, list[int], SamplingParams]] = []
    shared = prompt(20, seed)
    aborted = []
    for index in range(12):
        ids = [*shared[: draw.randrange(20)], *prompt(draw.randrange(1, 30), seed + index + 1)]
        wanted = params(
            draw.choice([None, 0, 4]), draw.choice([0, 1, 12, 25]), n=draw.choice([1, 1, 3]), seed=index
        )
        handle = submit(engine, ids, wanted)
        open_requests.append((handle, ids, wanted))
        for _ in range(draw.randrange(6)):
            step_and_preempt(engine, draw)
        if draw.random() < 0.2:
            aborted.append(handle)
            handle.abort()
    while step_and_preempt(engine, draw):
        pass
    assert_nothing_held(engine)
    assert engine.stats().preemptions > 0
    for handle, ids, wanted in open_requests:
        if handle in aborted:
            continue
        found, tokens, _ = scored(handle)
        if wanted.prompt_logprobs is None:
            assert found is None
        else:
            check(found, reference, ids, wanted.prompt_logprobs)
        alone = submit(lone, ids, wanted)
        run(lone)
        assert tokens == scored(alone)[1]


def test_a_preempted_request_computes_only_what_it_needs(path: Path, reference: Any) -> None:
    engine = make(path, blocks=64)
    ids = prompt(48)
    handle = submit(engine, ids, params(1, 2))
    engine.step()
    engine.step()
    [sequence] = engine.core.lifecycle.sequences.values()
    assert (sequence.computed, sequence.cacheable) == (32, 32)
    engine.core.lifecycle.preempt(sequence)
    run(engine)
    found, _, done = scored(handle)
    check(found, reference, ids, 1)
    assert done.metrics.preemptions == 1
    assert engine.stats().tokens_computed == 48 + 1  # the first 32 came back from the prefix cache
    assert engine.stats().prompt_tokens_reported == 47


def test_n_sequences_share_one_report(engine: Engine, reference: Any) -> None:
    ids = prompt(20)
    for max_tokens in (0, 2):
        handle = submit(engine, ids, params(2, max_tokens, n=3))
        run(engine)
        *deltas, _ = events(handle)
        check(deltas[0].prompt_logprobs, reference, ids, 2)
        assert [delta.index for delta in deltas if delta.finish_reason == "length"] == [0, 1, 2]
        assert sum(delta.prompt_logprobs is not None for delta in deltas) == 1
    assert engine.stats().prompt_tokens_reported == 2 * 19


@pytest.mark.parametrize(
    "engine", [{"sparse_prefill": "always", "prefill_attention": "blocksparse"}], indirect=True
)
def test_the_whole_prompt_is_read_densely_and_the_reply_says_so(engine: Engine, reference: Any) -> None:
    ids = prompt(200)
    handle = submit(engine, ids, params(1, 1))
    run(engine)
    found, _, done = scored(handle)
    check(found, reference, ids, 1)
    assert done.metrics.fallback == "prompt_logprobs"
    assert done.metrics.kept_tokens == 200
    stats = engine.stats()
    assert stats.prefill.fallbacks == {"prompt_logprobs": 1}
    assert stats.attention.read == stats.attention.visible


def test_logits_that_are_not_finite_fail_the_request_alone(path: Path, reference: Any) -> None:
    engine = make(path)
    with torch.no_grad():
        engine.model.module.get_input_embeddings().weight[7] = math.nan
    ids = prompt(20)
    bad = submit(engine, [*ids[:10], 7, *ids[10:]], params(1, 0))
    good = submit(engine, [token for token in ids if token != 7], params(1, 0))
    run(engine)
    [failed] = events(bad)
    assert isinstance(failed.error, EngineError)
    assert "not finite" in str(failed.error)
    check(scored(good)[0], reference, [token for token in ids if token != 7], 1)
    assert_nothing_held(engine)


# -- requests that generate nothing


def test_zero_tokens_read_the_prompt_and_end() -> None:
    engine = fake_engine(blocks=40, block_size=4, max_num_batched_tokens=7)
    handle = submit(engine, list(range(30)), SamplingParams(max_tokens=0, n=2))
    beside = submit(engine, [5, 6], SamplingParams(max_tokens=12, temperature=0))
    run(engine)
    *deltas, done = events(handle)
    assert deltas == [Delta(0, "", finish_reason="length"), Delta(1, "", finish_reason="length")]
    assert (done.metrics.prompt_tokens, done.metrics.generated_tokens) == (30, 0)
    assert engine.stats().outcomes == {"length": 2}
    assert len(events(beside)) == 13
    again = submit(engine, list(range(30)), SamplingParams(max_tokens=1, temperature=0))
    run(engine)
    assert events(again)[-1].metrics.cached_tokens == 28  # all full blocks


def test_zero_tokens_fill_the_context_window_and_the_pool() -> None:
    engine = fake_engine(blocks=4, block_size=4, max_positions=16)
    handle = submit(engine, list(range(16)), SamplingParams(max_tokens=0))
    run(engine)
    assert isinstance(events(handle)[-1], Finished)
    with pytest.raises(PromptTooLongError, match="context window of 16"):
        submit(engine, list(range(17)), SamplingParams(max_tokens=0))
    with pytest.raises(PromptTooLongError):
        submit(engine, list(range(16)), SamplingParams(max_tokens=1))
    small = fake_engine(blocks=3, block_size=4, max_positions=16)
    with pytest.raises(PromptTooLongError, match="KV pool of 12"):
        submit(small, list(range(13)), SamplingParams(max_tokens=0))


def test_zero_tokens_of_a_broken_prompt_fail() -> None:
    engine = fake_engine(blocks=40, block_size=4, max_num_batched_tokens=7)
    engine.core.model.module.nan_tokens = {9}
    handle = submit(engine, list(range(30)), SamplingParams(max_tokens=0))
    run(engine)
    [failed] = events(handle)
    assert "not finite" in str(failed.error)


def test_a_model_without_a_separate_head_refuses() -> None:
    engine = fake_engine(blocks=40)
    with pytest.raises(RequestError, match="FakeModule does not separate") as refused:
        submit(engine, [1, 2], params(1, 1))
    assert refused.value.fields == ("prompt_logprobs",)
