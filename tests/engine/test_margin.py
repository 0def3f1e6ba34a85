"""Slow-fast decode computes tokens that a fast step is not sure of again, in a slow step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.config import DecodeConfig, EngineConfig
from skim.engine.drafts import Drafts
from skim.engine.runner import Forward
from skim.measure.book import packaged_text
from skim.memory import groups
from skim.models.load import LoadedModel, load
from skim.sampling.batch import SamplerRow
from skim.sampling.grammar import Grammar
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.engine.identity import GREEDY, SEEDED, check_identity, engine_of
from tests.engine.test_exact import FAMILIES, check_same, prompts, replies
from tests.fake import continuation, fake_engine, run_together, submit

NEVER_SURE = 1e9
ON: dict[str, Any] = {"slow_fast": "on", "decode_budget": 64}
UNSURE: dict[str, Any] = {**ON, "refresh_margin": NEVER_SURE}
SOMETIMES: dict[str, Any] = {**ON, "refresh_margin": 0.05}  # of random weights, whose margins are small
PARAMS = {
    "greedy": GREEDY,
    "penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.2, logit_bias={7: 2.0}),
    "logprobs": replace(GREEDY, logprobs=3),
    "bad words": replace(GREEDY, bad_words=["ab", "x"], allowed_token_ids=list(range(60, 140))),
    "stops": replace(GREEDY, stop=["e", "zz"], min_tokens=5),
    "ends": replace(GREEDY, ignore_eos=False, stop_token_ids=[*range(40, 60)], min_tokens=3),
    "forks": replace(GREEDY, n=3),
    "grammar": replace(GREEDY, ignore_eos=False, grammar=Grammar.regex("[a-f]+(,[0-9]+)*")),
    "short": replace(GREEDY, max_tokens=2),
}


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.save("qwen3", tmp_path_factory.mktemp("one")), EngineConfig.of().model)


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "a step ahead"])
@pytest.mark.parametrize("name", PARAMS)
def test_a_model_that_is_never_sure_writes_what_dense_decode_writes(
    one_model: LoadedModel, name: str, overlaps: bool
) -> None:
    given = [(prompt, PARAMS[name], None) for prompt in prompts()]
    engine = engine_of(one_model, **UNSURE)
    engine.core.overlaps = overlaps
    check_same(replies(engine, given), replies(engine_of(one_model), given))
    stats = engine.stats().decode
    if name not in ("short", "grammar"):  # where a grammar leaves one token, the model is sure of it
        assert stats.fast >= stats.refreshes["margin"] > stats.slow / 2
    assert stats.drafted == 0
    assert not engine.core.memory.tables


@pytest.mark.parametrize("family", FAMILIES)
def test_never_sure_alone_together_and_with_preemptions(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LEAST_CHUNK", 1)  # so that sequences with windows hold few blocks to spare
    model = load(tiny.save(family, tmp_path), EngineConfig.of().model)
    check_identity(model, prompts(), GREEDY, UNSURE)


@pytest.mark.parametrize("seed", range(6))
def test_any_settings_in_a_mixed_batch(one_model: LoadedModel, seed: int) -> None:
    """Requests that are never sure, sometimes sure, dense and exact, side by side."""
    rng = random.Random(seed)
    common: dict[str, Any] = {
        "block_size": rng.choice([2, 4, 16]),
        "max_num_batched_tokens": rng.choice([16, 40, 512]),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    given: list[tuple[list[int], SamplingParams, Any]] = []
    same: list[int] = []
    for place in range(6):
        prompt = [rng.randrange(250) for _ in range(rng.randrange(20, 200))]
        params = replace(PARAMS[rng.choice(list(PARAMS))], max_tokens=24)
        margin = rng.choice([NEVER_SURE, NEVER_SURE, 0.05])
        kind = "on" if margin < NEVER_SURE else rng.choice(["on", "on", "off", "exact"])
        if margin == NEVER_SURE:
            same.append(place)
        budget = rng.choice([16, 40, 128])
        given.append((prompt, params, DecodeConfig(kind, 1, budget, refresh_margin=margin)))
    expected = replies(
        engine_of(one_model, **common), [(prompt, params, None) for prompt, params, _ in given]
    )
    engine = engine_of(one_model, **common, slow_fast="on")
    if tokens := rng.choice([None, 900, 500]):
        pool = engine.core.memory.pool
        engine = engine_of(
            one_model, **common, slow_fast="on", kv_memory=tokens // pool.block_size * pool.block_bytes
        )
    engine.core.overlaps = rng.random() < 0.5
    found = replies(engine, given)
    check_same([found[place] for place in same], [expected[place] for place in same])


@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_are_final_without_a_slow_step_only_if_the_model_is_sure(
    one_model: LoadedModel, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins: dict[int, list[float]] = {}
    settles, settle = Drafts.settles, Drafts.settle
    settled: list[float] = []

    def asked(self: Drafts, slot: int, result: Any) -> bool:
        margins.setdefault(id(self), []).append(result.margin)
        return settles(self, slot, result)

    def done(self: Drafts) -> SamplerRow:
        settled.append(margins[id(self)][-1])
        return settle(self)

    monkeypatch.setattr(Drafts, "settles", asked)
    monkeypatch.setattr(Drafts, "settle", done)
    engine = engine_of(one_model, **SOMETIMES)
    engine.core.overlaps = overlaps
    found = run_together(engine, prompts(), GREEDY)
    assert [len(tokens) for tokens in found] == [40] * 4
    stats = engine.stats().decode
    assert settled
    assert min(settled) > SOMETIMES["refresh_margin"]
    assert stats.slow + len(settled) == 4 * 39  # the prompt draws the first token
    dropped = stats.fast - len(settled)
    assert 0 < stats.refreshes["margin"] <= dropped <= (1 + overlaps) * stats.refreshes["margin"]
    assert set(stats.refreshes) <= {"first", "interval", "sentence", "mass", "margin"}


def test_sampled_replies_and_a_margin_of_0_use_every_token(one_model: LoadedModel) -> None:
    for params, settings in ((SEEDED, UNSURE), (GREEDY, {**ON, "refresh_margin": 0.0})):
        engine = engine_of(one_model, **settings)
        run_together(engine, prompts(), params)
        stats = engine.stats().decode
        assert stats.fast > 0 == stats.refreshes["margin"]


def test_slots_after_a_sure_token_are_not_shared(one_model: LoadedModel) -> None:
    engine = engine_of(one_model, **{**SOMETIMES, "refresh_margin": 1e-6}, block_size=4)
    prompt = prompts()[0]
    [reply] = run_together(engine, [prompt], GREEDY)
    handle = submit(engine, [*prompt, *reply, 1], SamplingParams(temperature=0, max_tokens=1))
    while engine.step():
        pass
    last = list(handle)[-1]
    # The first decode step is slow, so its slot is exact.
    assert last.metrics.cached_tokens <= len(prompt) + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("overlaps", [False, True])
def test_fast_steps_that_are_not_finite_are_computed_again(one_model: LoadedModel, overlaps: bool) -> None:
    dense = run_together(engine_of(one_model), prompts(), GREEDY)
    engine = engine_of(one_model, **SOMETIMES)
    engine.core.overlaps = overlaps
    forward = engine.core.runner.forward

    def broken(*args: Any) -> Forward:
        found = forward(*args)
        return found if found.mass is None else found._replace(mass=torch.full_like(found.mass, torch.nan))

    engine.core.runner.forward = broken  # type: ignore[method-assign]
    assert run_together(engine, prompts(), GREEDY) == dense


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("margin", [0.2, NEVER_SURE])
def test_a_sequence_that_needs_the_whole_pool_ends(margin: float, overlaps: bool) -> None:
    settings = {**ON, "decode_budget": 4, "refresh_margin": margin}
    engine = fake_engine(blocks=10, block_size=2, **settings)
    engine.core.overlaps = overlaps
    prompt = list(range(8))
    params = SamplingParams(temperature=0, max_tokens=13)
    assert run_together(engine, [prompt], params) == [continuation(prompt, 13)]
    assert engine.stats().preemptions == 0
    assert (engine.stats().decode.refreshes["margin"] > 0) == (margin == NEVER_SURE)  # the fake model is sure


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_policy_ends_a_round_of_sure_tokens(overlaps: bool) -> None:
    """With slow rows of one query: on CUDA, only these renew the evidence."""
    settings = {**ON, "decode_budget": 4, "refresh_interval": 16, "refresh_mass": 0.0}
    engine = fake_engine(blocks=400, block_size=4, **settings)
    engine.core.overlaps = overlaps
    slow: list[int] = []
    forward = engine.core.runner.forward

    def recorded(inputs: Any, before: Any) -> Forward:
        slow.extend(
            one.row.queries for one in inputs if one.row.evidence is not None and one.row.fast is None
        )
        return forward(inputs, before)

    engine.core.runner.forward = recorded  # type: ignore[method-assign]
    run_together(engine, [list(range(20))], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert engine.stats().decode.refreshes["interval"] == 24
    assert slow == [1] * 25  # the first, and one for each interval


def test_preempting_one_sequence_changes_no_other(one_model: LoadedModel) -> None:
    settings: dict[str, Any] = {**SOMETIMES, "block_size": 16, "enable_prefix_caching": False}
    given = prompts()
    pool = engine_of(one_model, **settings).core.memory.pool
    blocks = sum(pool.geometry.blocks_of(len(prompt) + 10) for prompt in given)
    small = engine_of(one_model, **settings, kv_memory=blocks * pool.block_bytes)
    handles = [submit(small, prompt, GREEDY) for prompt in given]
    while small.step():
        pass
    events = [list(handle) for handle in handles]
    preempted = [own[-1].metrics.preemptions for own in events]  # type: ignore[union-attr]
    assert any(preempted)
    assert not all(preempted)
    for prompt, own, times in zip(given, events, preempted, strict=True):
        if not times:
            tokens = [token for event in own for token in getattr(event, "token_ids", ())]
            assert [tokens] == run_together(engine_of(one_model, **settings), [prompt], GREEDY)


@pytest.mark.parametrize("overlaps", [False, True])
def test_any_token_budget_has_room_for_unsure_tokens(overlaps: bool) -> None:
    for budget in (1, 2, 64):
        settings = {**UNSURE, "decode_budget": 4, "max_num_batched_tokens": budget}
        engine = fake_engine(blocks=80, block_size=2, **settings)
        engine.core.overlaps = overlaps
        prompt = list(range(20))
        params = SamplingParams(temperature=0, max_tokens=40)
        assert run_together(engine, [prompt], params) == [continuation(prompt, 40)]
        assert engine.stats().decode.refreshes["margin"] == 38  # all but the first two tokens
        assert max(engine.stats().step_sizes) <= budget


def test_the_real_model_is_mostly_sure_and_identical_to_dense_if_it_never_is(default_model_dir: Path) -> None:
    model = load(default_model_dir, EngineConfig.of().model)
    text = model.tokenizer(packaged_text()[:60_000])["input_ids"]
    given = [text[start : start + 700] for start in (0, 3000, 6000, 9000)]
    params = replace(GREEDY, max_tokens=24)
    for margin in (DecodeConfig().refresh_margin, NEVER_SURE):
        engine = engine_of(model, kv_memory="256M", slow_fast="on", decode_budget=288, refresh_margin=margin)
        found = run_together(engine, given, params)
        stats = engine.stats().decode
        assert stats.refreshes["margin"]
        if margin == NEVER_SURE:
            assert found == run_together(engine_of(model, kv_memory="256M"), given, params)
        else:
            assert stats.fast > 2 * stats.refreshes["margin"]
