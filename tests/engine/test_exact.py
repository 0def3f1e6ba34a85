"""Exact slow-fast decode: whatever is drafted, every reply is that of dense decode."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.config import DecodeConfig, EngineConfig
from skim.decode.drafts import MOST
from skim.engine.engine import Engine
from skim.engine.runner import Forward
from skim.engine.sequence import Delta, Finished
from skim.measure.book import packaged_text
from skim.memory import groups
from skim.models.load import LoadedModel, load
from skim.sampling.grammar import Grammar
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.engine.identity import GREEDY, SEEDED, check_identity, engine_of
from tests.fake import continuation, fake_engine, run_together, submit

FAMILIES = ("qwen3", "gemma3", "gpt_oss")
EXACT: dict[str, Any] = {"slow_fast": "exact", "slow_fast_min_context": 1, "decode_budget": 64}
PARAMS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "cold": replace(SEEDED, temperature=0.4),
    "penalties": replace(
        SEEDED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={7: 2.0}
    ),
    "penalties, greedy": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs": replace(SEEDED, logprobs=3),
    "bad words": replace(SEEDED, bad_words=["ab", "x"], allowed_token_ids=list(range(60, 140))),
    "stops": replace(GREEDY, stop=["e", "zz"], min_tokens=5),
    "ends": replace(SEEDED, ignore_eos=False, stop_token_ids=[40, 41, 42, 43], min_tokens=3),
    "forks": replace(SEEDED, n=3),
    "grammar": replace(SEEDED, ignore_eos=False, grammar=Grammar.regex("[a-f]+(,[0-9]+)*")),
    "short": replace(SEEDED, max_tokens=2),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.save(request.param, tmp_path_factory.mktemp(request.param)), EngineConfig.of().model)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.save("qwen3", tmp_path_factory.mktemp("one")), EngineConfig.of().model)


def prompts(seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(250) for _ in range(length)] for length in (300, 130, 220, 90)]


def replies(engine: Engine, given: list[tuple[list[int], SamplingParams, Any]]) -> list[Any]:
    """Tokens, texts, log-probabilities and ends of requests that run together, by sequence."""
    handles = [submit(engine, prompt, params, decode=decode) for prompt, params, decode in given]
    while engine.step():
        engine.core.memory.check()
    found: list[Any] = []
    for handle, (_, params, _) in zip(handles, given, strict=True):
        *deltas, last = handle
        assert isinstance(last, Finished)
        own: list[list[Any]] = [[[], "", [], None, None] for _ in range(params.n)]
        for delta in deltas:
            assert isinstance(delta, Delta)
            mine = own[delta.index]
            mine[0] += delta.token_ids
            mine[1] += delta.text
            mine[2] += [one.logprob for one in delta.logprobs]
            mine[3:] = delta.finish_reason, delta.stop_reason
        found.append(own)
    assert engine.core.lifecycle.sampler.counts.free == engine.core.lifecycle.sampler.counts.capacity
    return found


def check_same(found: list[Any], expected: list[Any]) -> None:
    for mine, other in zip(found, expected, strict=True):
        for (*rest, logprobs, reason, stop), (*same, likely, why, stopped) in zip(mine, other, strict=True):
            assert (rest, reason, stop) == (same, why, stopped)
            assert logprobs == pytest.approx(likely, abs=2e-2)


def check_alike(found: list[Any], expected: list[Any], names: list[str]) -> None:
    """Replies over codes, with log-probabilities. Rounding may flip a code, and that may decide a tie."""
    agreed = tokens = 0
    for mine, other, name in zip(found, expected, names, strict=True):
        for (own, _, logprobs, *_), (same, _, likely, *_) in zip(mine, other, strict=True):
            pairs = list(zip(own, same, strict=False))
            turn = next((i for i, (one, another) in enumerate(pairs) if one != another), len(pairs))
            seen = turn + (name in ("greedy", "stops"))  # both drew their likeliest token
            assert logprobs[:seen] == pytest.approx(likely[:seen], abs=2e-2)
            agreed, tokens = agreed + turn, tokens + max(len(own), len(same))
    assert agreed > tokens / 2


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
@pytest.mark.parametrize("name", PARAMS)
def test_replies_are_those_of_dense_decode(one_model: LoadedModel, name: str, overlaps: bool) -> None:
    given = [(prompt, PARAMS[name], None) for prompt in prompts()]
    expected = replies(engine_of(one_model), given)
    engine = engine_of(one_model, **EXACT)
    engine.core.overlaps = overlaps
    check_same(replies(engine, given), expected)
    stats = engine.stats().decode
    if name != "short":
        assert 0 < stats.accepted < stats.drafted
        assert stats.refreshes["verify"] <= stats.slow
    assert not engine.core.memory.tables


def test_identical_alone_together_and_with_preemptions(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LEAST_CHUNK", 1)  # so that sequences with windows hold few blocks to spare
    for params in (GREEDY, SEEDED):
        _, small = check_identity(model, prompts(), params, EXACT)
        assert small.stats().decode.accepted


@pytest.mark.parametrize("seed", range(10))
def test_any_settings_in_a_mixed_batch(one_model: LoadedModel, seed: int) -> None:
    rng = random.Random(seed)
    common = {
        "block_size": rng.choice([2, 4, 16, 32]),
        "kv_cache_dtype": rng.choice(["auto", "auto", "int8", "k8v4"]),
        "max_num_batched_tokens": rng.choice([16, 40, 512]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    coded = common["kv_cache_dtype"] != "auto"
    given: list[tuple[list[int], SamplingParams, Any]] = []
    names: list[str] = []
    exact: list[int] = []
    for place in range(5):
        prompt = [rng.randrange(250) for _ in range(rng.randrange(20, 200))]
        names.append(rng.choice(list(PARAMS)))
        params = replace(PARAMS[names[-1]], seed=rng.randrange(1000), max_tokens=24)
        if coded:
            params = replace(params, logprobs=1)
        budget = rng.choice([16, 40, 128])
        kind = rng.choice(["exact", "exact", "exact", "off", "on"])
        if kind != "on":
            exact.append(place)
        given.append((prompt, params, DecodeConfig(kind, 1, budget)))
    dense = engine_of(one_model, **common)
    expected = replies(dense, [(prompt, params, None) for prompt, params, _ in given])
    engine = engine_of(one_model, **common, slow_fast="on")
    if not coded and (tokens := rng.choice([None, 900, 500])):
        pool = engine.core.memory.pool
        common["kv_memory"] = tokens // pool.block_size * pool.block_bytes
        engine = engine_of(one_model, **common, slow_fast="on")
    engine.core.overlaps = rng.random() < 0.5
    found = replies(engine, given)
    got, wanted, drawn = ([every[place] for place in exact] for every in (found, expected, names))
    if coded:
        check_alike(got, wanted, drawn)
    else:
        check_same(got, wanted)


def test_the_real_model_is_identical_to_dense(default_model_dir: Path) -> None:
    model = load(default_model_dir, EngineConfig.of().model)
    text = model.tokenizer(packaged_text()[:9000])["input_ids"]
    given = [text[:380], text[900:1210], text[300:600]]
    settings = {**EXACT, "decode_budget": 256}
    dense, engine = engine_of(model, kv_memory="256M"), engine_of(model, kv_memory="256M", **settings)
    pool = engine.core.memory.pool
    memory = ((sum(map(len, given)) + len(given[2])) // pool.block_size + 4) * pool.block_bytes
    small = engine_of(model, kv_memory=memory, enable_prefix_caching=False, **settings)
    for params in (replace(GREEDY, max_tokens=20), replace(SEEDED, max_tokens=20)):
        alone = [run_together(dense, [prompt], params)[0] for prompt in given]
        assert run_together(engine, given[:1], params) == alone[:1]
        other = submit(small, given[2], params, decode=DecodeConfig("on", decode_budget=256))
        assert run_together(small, given, params) == alone
        assert isinstance(list(other)[-1], Finished)
    assert small.stats().preemptions
    for stats in (engine.stats().decode, small.stats().decode):
        assert stats.accepted > 0.3 * stats.drafted > 0


def test_counts_add_up_and_verified_slots_are_shared(one_model: LoadedModel) -> None:
    engine = engine_of(one_model, **EXACT, block_size=4)
    handles = [submit(engine, prompt, GREEDY) for prompt in prompts()]
    while engine.step():
        pass
    metrics = [list(handle)[-1].metrics for handle in handles]  # type: ignore[union-attr]
    total = engine.stats().decode
    parts = [one.decode for one in metrics if one.decode is not None]
    assert len(parts) == 4
    for stats in (total, *parts):
        assert stats.fast == stats.drafted >= stats.accepted > 0
        assert stats.slow == sum(stats.refreshes.values())
    for part in parts:
        # Each slow row draws a token beside the accepted drafts; the prompt's own row draws the first token.
        assert part.accepted + part.slow == 39
    for field in ("slow", "fast", "drafted", "accepted", "blocks", "blocks_read"):
        assert getattr(total, field) == sum(getattr(part, field) for part in parts)
    prompt, reply = prompts()[0], run_together(engine, prompts()[:1], GREEDY)[0]
    handle = submit(engine, [*prompt, *reply, 1], SamplingParams(temperature=0, max_tokens=1))
    while engine.step():
        pass
    cached = list(handle)[-1].metrics.cached_tokens  # type: ignore[union-attr]
    assert cached >= len(prompt) + len(reply) - 5  # the last token is not computed, and blocks are whole


def test_drafts_that_are_not_finite_are_not_accepted(one_model: LoadedModel) -> None:
    dense = run_together(engine_of(one_model), prompts(), SEEDED)
    for overlaps in (False, True):
        engine = engine_of(one_model, **EXACT)
        engine.core.overlaps = overlaps
        forward = engine.core.runner.forward
        rng = random.Random(5)

        def broken(*args: Any, forward: Any = forward, rng: Any = rng) -> Forward:
            found = forward(*args)
            if found.mass is None or rng.random() < 0.5:
                return found  # type: ignore[no-any-return]
            if rng.random() < 0.5:
                return found._replace(mass=torch.full_like(found.mass, float("nan")))  # type: ignore[no-any-return]
            first = 0
            logits = found.logits.clone()
            for one in args[0]:
                if one.row.fast is not None:
                    logits[first] = float("nan")
                first += one.wants_logits
            return found._replace(logits=logits)  # type: ignore[no-any-return]

        engine.core.runner.forward = broken  # type: ignore[method-assign]
        assert run_together(engine, prompts(), SEEDED) == dense


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_give_way_before_a_sequence_is_preempted(guesses: bool, overlaps: bool) -> None:
    """A sequence that needs every block of the pool is never preempted for the sake of its drafts."""
    engine = fake_engine(blocks=10, block_size=2, **{**EXACT, "decode_budget": 4})
    engine.core.overlaps = overlaps
    engine.model.module.guesses = guesses
    prompt = list(range(8))
    params = SamplingParams(temperature=0, max_tokens=13)
    assert run_together(engine, [prompt], params) == [continuation(prompt, 13)]
    assert engine.stats().preemptions == 0
    stats = engine.stats().decode
    assert stats.drafted > 0
    assert (stats.accepted < stats.drafted) == guesses


def test_a_small_token_budget_leaves_no_room_for_drafts() -> None:
    for budget, drafts in ((3, False), (4, True), (64, True)):
        engine = fake_engine(
            blocks=80, block_size=2, max_num_batched_tokens=budget, **{**EXACT, "decode_budget": 4}
        )
        prompt = list(range(20))
        params = SamplingParams(temperature=0, max_tokens=120)
        assert run_together(engine, [prompt], params) == [continuation(prompt, 120)]
        stats = engine.stats().decode
        assert (stats.drafted > 0) == drafts
        assert max(engine.stats().step_sizes) <= budget
        assert stats.accepted == stats.drafted
        if budget == 64:
            assert MOST + 1 in engine.stats().step_sizes  # rounds grow with acceptance


def test_rounds_of_a_batch_are_verified_together() -> None:
    engine = fake_engine(blocks=200, block_size=4, **{**EXACT, "decode_budget": 4})
    params = SamplingParams(temperature=0, max_tokens=60)
    given = [list(range(start, start + 20)) for start in (0, 5, 9)]
    first = submit(engine, given[0], params)
    for _ in range(6):
        engine.step()
    others = [submit(engine, prompt, params) for prompt in given[1:]]
    while engine.step():
        pass
    for handle, prompt in zip((first, *others), given, strict=True):
        tokens = [token for event in handle if isinstance(event, Delta) for token in event.token_ids]
        assert tokens == continuation(prompt, 60)
    sizes = engine.stats().step_sizes
    several = sum(count for size, count in sizes.items() if size > 2 * len(given))
    assert several <= engine.stats().decode.refreshes["verify"] / 2
