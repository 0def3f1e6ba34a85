"""Slow-fast decode in the engine: identical to dense where it reads everything, and counted elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.attention.step import Row
from skim.attention.watch import WATCHED
from skim.config import DecodeConfig, EngineConfig
from skim.engine.engine import Engine
from skim.engine.lifecycle import NOT_FINITE
from skim.engine.runner import Forward
from skim.engine.sequence import Delta, Failed, Finished, RequestMetrics, Sequence
from skim.engine.slow_fast import SlowFast
from skim.errors import RequestError
from skim.measure.book import packaged_text
from skim.measure.modes import RefreshOnly
from skim.memory import groups
from skim.models.load import LoadedModel, load
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.engine.identity import GREEDY, SEEDED, check_identity, engine_of
from tests.fake import run_together, submit

FAMILIES = ("qwen3", "gemma3", "gpt_oss")
ON: dict[str, Any] = {"slow_fast": "on", "decode_budget": 64, "refresh_margin": 0.0}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.save(request.param, tmp_path_factory.mktemp(request.param)), EngineConfig.of().model)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.save("qwen3", tmp_path_factory.mktemp("one")), EngineConfig.of().model)


def prompts() -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(250) for _ in range(length)] for length in (500, 330, 420, 90)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "settings",
    [{"decode_budget": 1024}, {"decode_budget": 64, "refresh_interval": 1}],
    ids=["the budget covers the context", "every step is slow"],
)
def test_identical_to_dense_alone_together_and_with_preemptions(
    model: LoadedModel,
    params: SamplingParams,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "LEAST_CHUNK", 1)  # so that sequences with windows hold few blocks to spare
    check_slow(model, params, {"slow_fast": "on", "block_size": 16, **settings})


def test_identical_to_dense_with_quantized_keys_and_values(one_model: LoadedModel) -> None:
    settings = {"decode_budget": 64, "refresh_interval": 1, "kv_cache_dtype": "int8"}
    check_slow(one_model, SEEDED, {"slow_fast": "on", "block_size": 16, **settings})


def check_slow(model: LoadedModel, params: SamplingParams, settings: dict[str, Any]) -> None:
    """Identity of settings under which no step is fast."""
    engine, small = check_identity(model, prompts(), params, settings)
    assert small.stats().decode.fast == engine.stats().decode.fast == 0


def test_the_real_model_is_identical_to_dense(default_model_dir: Path) -> None:
    model = load(default_model_dir, EngineConfig.of().model)
    text = model.tokenizer(packaged_text()[:4000])["input_ids"]
    given = [text[:640], text[300:500]]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    dense = run_together(engine_of(model, kv_memory="256M"), given, params)
    for settings in ({"decode_budget": 4096}, {"decode_budget": 300, "refresh_interval": 1}):
        engine = engine_of(model, kv_memory="256M", slow_fast="on", **settings)
        assert run_together(engine, given, params) == dense
    fast = engine_of(model, kv_memory="256M", slow_fast="on", decode_budget=512, refresh_margin=0.0)
    run_together(fast, given, params)
    stats = fast.stats().decode
    assert stats.fast > 0
    assert 0.3 < (stats.mean_mass or 0) < 1


def test_rows_blocks_and_reasons_add_up(model: LoadedModel) -> None:
    engine = engine_of(model, **ON, refresh_interval=16, block_size=4)
    handles = [submit(engine, prompt, GREEDY) for prompt in prompts()]
    while engine.step():
        pass
    metrics = [list(handle)[-1].metrics for handle in handles]  # type: ignore[union-attr]
    total = engine.stats().decode
    parts = [one.decode for one in metrics if one.decode is not None]
    assert len(parts) == 4
    for stats in (total, *parts):
        assert stats.slow == sum(stats.refreshes.values()) > 0
        assert 0 < stats.blocks_read <= stats.blocks
    assert all(part.refreshes["first"] == 1 for part in parts)
    assert total.refreshes["interval"]
    assert total.rows == sum(part.rows for part in parts) == 4 * 39  # the first token is the prompt's
    assert total.blocks_read == sum(part.blocks_read for part in parts) < total.blocks
    assert total.mass == pytest.approx(sum(part.mass for part in parts))
    assert 0 < (total.mean_mass or 0) <= 1


def test_fast_steps_change_the_text_but_not_that_of_dense_requests_beside_them(model: LoadedModel) -> None:
    dense = run_together(engine_of(model), prompts(), GREEDY)
    engine = engine_of(model, **ON)
    off = DecodeConfig(slow_fast="off")
    handles = [
        submit(engine, prompt, GREEDY, decode=off if index % 2 else None)
        for index, prompt in enumerate(prompts())
    ]
    while engine.step():
        pass
    found = [[t for event in handle for t in getattr(event, "token_ids", ())] for handle in handles]
    assert found[1] == dense[1]
    assert found[3] == dense[3]
    assert found[0] != dense[0] or found[2] != dense[2]


def test_slots_of_fast_steps_are_not_shared_with_other_requests(one_model: LoadedModel) -> None:
    engine = engine_of(one_model, **ON, block_size=4)
    prompt = prompts()[0]
    [reply] = run_together(engine, [prompt], GREEDY)

    def cached(tokens: list[int]) -> RequestMetrics:
        handle = submit(engine, tokens, SamplingParams(temperature=0, max_tokens=1))
        while engine.step():
            pass
        last = list(handle)[-1]
        assert isinstance(last, Finished)
        return last.metrics

    # The first decode step is slow, so its slot is exact.
    assert len(prompt) - 4 < cached([*prompt, *reply, 1]).cached_tokens <= len(prompt) + 1


def test_a_request_cannot_use_what_the_engine_did_not_plan_for(one_model: LoadedModel) -> None:
    engine = engine_of(one_model)
    with pytest.raises(RequestError, match="slow_fast 'on' needs an engine that started"):
        submit(engine, [1, 2], GREEDY, decode=DecodeConfig(slow_fast="on"))
    submit(engine, [1, 2], GREEDY, decode=DecodeConfig(slow_fast="off"))
    ready = engine_of(one_model, slow_fast="auto", slow_fast_min_context=10_000)
    handle = submit(ready, prompts()[0], GREEDY, decode=DecodeConfig(slow_fast="on", decode_budget=64))
    other = submit(ready, prompts()[0], GREEDY)
    while ready.step():
        pass
    assert list(handle)[-1].metrics.decode is not None  # type: ignore[union-attr]
    assert list(other)[-1].metrics.decode is None  # type: ignore[union-attr]


def test_a_mass_that_is_not_finite_fails_the_request(one_model: LoadedModel) -> None:
    engine = engine_of(one_model, **ON)
    forward = engine.core.runner.forward

    def broken(*args: Any) -> Forward:
        found = forward(*args)
        if found.mass is None:
            return found
        return found._replace(mass=torch.full_like(found.mass, float("nan")))

    engine.core.runner.forward = broken  # type: ignore[method-assign]
    handle = submit(engine, prompts()[0], GREEDY)
    while engine.step():
        pass
    last = next(event for event in handle_events(handle) if isinstance(event, Failed))
    assert NOT_FINITE in str(last.error)


def handle_events(handle: Any) -> list[Any]:
    found = []
    while not handle.events.empty():
        found.append(handle.events.get())
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_ahead_of_its_results_only_delays_sentences_and_masses(
    one_model: LoadedModel, overlaps: bool
) -> None:
    engine = engine_of(one_model, **ON, refresh_interval=10)
    engine.core.overlaps = overlaps
    run_together(engine, prompts(), GREEDY)
    stats = engine.stats().decode
    assert stats.rows == 4 * 39
    assert stats.fast > stats.slow >= 4 * 4


LONG: dict[str, Any] = {**ON, "block_size": 4}


def text_of(engine: Engine, prompt: list[int], **params: Any) -> tuple[dict[int, list[int]], int]:
    """The tokens of each sequence, and the number of prompt tokens that were cached."""
    handle = submit(engine, prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **params))
    while engine.step():
        pass
    events = list(handle)
    found: dict[int, list[int]] = {}
    for event in events[:-1]:
        assert isinstance(event, Delta)
        found.setdefault(event.index, []).extend(event.token_ids)
    assert isinstance(events[-1], Finished)
    return found, events[-1].metrics.cached_tokens


def test_a_cached_prompt_gives_the_same_text_because_its_end_is_computed_again(
    one_model: LoadedModel,
) -> None:
    prompt = prompts()[0]
    engine = engine_of(one_model, **LONG)
    cold, none = text_of(engine, prompt)
    warm, cached = text_of(engine, prompt)
    assert (none, cached) == (0, len(prompt) - WATCHED)
    assert warm == cold
    assert text_of(engine_of(one_model, **LONG, max_num_batched_tokens=37), prompt)[0] == cold


def test_the_sequences_of_a_request_share_the_evidence_of_their_prompt(one_model: LoadedModel) -> None:
    prompt = prompts()[0]
    alone = text_of(engine_of(one_model, **LONG), prompt)[0][0]
    found, _ = text_of(engine_of(one_model, **LONG), prompt, n=3)
    assert found == {0: alone, 1: alone, 2: alone}


def test_evidence_stays_with_its_sequence(one_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fast step of a sequence, a fork or a preempted one has evidence of the end of the prompt."""
    made: list[Row] = []
    seen: set[int] = set()
    chunk, row = SlowFast.chunk, SlowFast.row

    def watched(self: SlowFast, sequence: Sequence, given: Row) -> Row:
        found = chunk(self, sequence, given)
        if found.watch is not None:
            made.append(found)
            assert found.watch.slots == range(sequence.slots.prompt - WATCHED, sequence.slots.prompt)
        return found

    def decoded(self: SlowFast, sequence: Sequence, given: Row) -> Row:
        found = row(self, sequence, given)
        assert found.evidence is not None
        full = (sequence.slots.prompt // 4) - 1
        assert found.evidence.shares[:, :, :full].sum(dim=2).gt(0.5).all()  # found before the first step
        assert found.evidence.shares.data_ptr() not in seen or found.evidence is sequence.evidence
        seen.add(found.evidence.shares.data_ptr())
        return found

    monkeypatch.setattr(SlowFast, "chunk", watched)
    monkeypatch.setattr(SlowFast, "row", decoded)
    pool = engine_of(one_model, **LONG).core.memory.pool
    tight = engine_of(one_model, **LONG, kv_memory=320 * pool.block_bytes)
    given = [prompt for prompt in prompts() if len(prompt) > 100]
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=40, ignore_eos=True)
    handles = [submit(tight, prompt, params) for prompt in given]
    while tight.step():
        pass
    assert all(isinstance(list(handle)[-1], Finished) for handle in handles)
    assert tight.stats().preemptions
    assert len(made) > len(given)
    assert len(seen) >= 2 * len(given)


def test_a_request_without_slow_fast_decode_is_not_watched(one_model: LoadedModel) -> None:
    engine = engine_of(one_model, **LONG)
    prompt = prompts()[0]
    run_together(engine, [prompt], GREEDY)
    handle = submit(engine, prompt, GREEDY, decode=DecodeConfig(slow_fast="off"))
    while engine.step():
        pass
    last = list(handle)[-1]
    assert isinstance(last, Finished)
    assert last.metrics.cached_tokens >= len(prompt) - 4


NEEDLE = "The access code for the Geneva office is 48213."
QUESTION = "According to the text, what is the access code for the Geneva office?"


def test_the_real_model_finds_a_fact_that_the_question_asks_for(
    default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast steps answer like dense ones. With the latest blocks, or if the prompt's end is not watched, they
    do not. Tokens that the model is not sure of are used as they are."""
    model = load(default_model_dir, EngineConfig.of().model)
    text = packaged_text()[300_000:306_000]
    middle = text.index(". ", 2500) + 2
    content = f"{text[:middle]}{NEEDLE} {text[middle:]}\n\n{QUESTION}"
    chat = [{"role": "user", "content": content}]
    prompt = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=20)
    engine = engine_of(model, kv_memory="256M", slow_fast="on", decode_budget=384)

    def reply(decode: DecodeConfig) -> str:
        handle = submit(engine, prompt, params, decode=decode)
        while engine.step():
            pass
        return "".join(event.text for event in list(handle) if isinstance(event, Delta))

    assert "48213" in reply(DecodeConfig(slow_fast="off"))
    ours = DecodeConfig(slow_fast="on", decode_budget=384, refresh_margin=0.0)
    assert "48213" in reply(ours)
    assert "48213" not in reply(RefreshOnly(slow_fast="on", decode_budget=384, refresh_margin=0.0))
    monkeypatch.setattr(SlowFast, "chunk", lambda _, __, row: row)
    assert "48213" not in reply(ours)
    assert engine.stats().decode.fast > engine.stats().decode.slow
