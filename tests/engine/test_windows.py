"""Blocks that end behind sliding windows, through the whole engine: the same text in less memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from skim.config import EngineConfig
from skim.engine import keeper as keepers
from skim.engine import profile
from skim.engine.engine import Engine
from skim.engine.sequence import Delta, Finished, RequestMetrics
from skim.errors import RequestError
from skim.memory import groups
from skim.memory.groups import one_group
from skim.models.load import LoadedModel, load
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import continuation, fake_engine, submit

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = [i * i % 61 for i in range(200)]
OTHER = [i * 7 % 59 for i in range(200)]


def ask(engine: Engine, prompt: list[int], **options: object) -> tuple[list[int], RequestMetrics]:
    handle = submit(engine, prompt, GREEDY, **options)  # type: ignore[arg-type]
    while engine.step():
        engine.core.memory.check()
    events = list(handle)
    assert isinstance(events[-1], Finished)
    return [t for e in events if isinstance(e, Delta) for t in e.token_ids], events[-1].metrics


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and files of a few tokens."""
    monkeypatch.setattr(groups, "LEAST_CHUNK", 4)
    monkeypatch.setattr(keepers, "TOKENS", 32)
    monkeypatch.setattr(keepers, "SHORTEST", 8)
    monkeypatch.setattr(keepers, "LEAST_GAIN", 4)


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_prompt_fits_a_pool_that_could_not_keep_its_windows(small: None, caching: bool) -> None:
    engine = fake_engine(
        blocks=52 + 3 * 8, windows=(6, 6, 6), max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    pool = engine.core.memory.pool
    assert pool.geometry.tokens_in(pool.capacity, whole=True) < 80 < 200 < pool.token_capacity
    assert ask(engine, TEXT[:190])[0] == continuation(TEXT[:190], 8)
    assert pool.stats().ended >= 3 * 45
    with pytest.raises(RequestError, match="can never fit the KV pool"):
        submit(engine, TEXT * 2, GREEDY)


def test_the_next_turn_and_another_question_resume_the_prefix(small: None) -> None:
    engine = fake_engine(blocks=1000, windows=(6, 9))
    reply, _ = ask(engine, TEXT[:100])
    turn = [*TEXT[:100], *reply, 5, 6]
    assert ask(engine, turn)[1].cached_tokens >= 100
    question = [*TEXT[:60], 62, 2, 3]
    tokens, metrics = ask(engine, question)
    assert (tokens, metrics.cached_tokens) == (continuation(question, 8), 60)


def test_windows_go_before_whole_prefixes(small: None) -> None:
    engine = fake_engine(blocks=3 * 50, windows=(6, 6))
    for text in (TEXT, OTHER):
        ask(engine, text[:120])
    assert engine.stats().prefix.evicted_blocks > 0
    for text in (TEXT, OTHER):  # without windows that end, the first one would be gone
        assert ask(engine, [*text[:120], 3])[1].cached_tokens >= 116


def test_a_prefix_whose_windows_ended_comes_back_from_files(small: None, tmp_path: Path) -> None:
    def start() -> Engine:
        return fake_engine(blocks=3 * 30, windows=(6, 6), checkpoint_dir=str(tmp_path))

    engine = start()
    for text in (TEXT[:110], OTHER[:110], OTHER[10:120], TEXT[20:130]):
        assert ask(engine, text)[0] == continuation(text, 8)
        written = threading.Event()
        engine.keeper._writer.call(written.set)
        assert written.wait(60)
    tokens, metrics = ask(engine, [*TEXT[:110], 1, 2])
    assert tokens == continuation([*TEXT[:110], 1, 2], 8)
    assert metrics.restored_tokens >= 64
    engine.close()
    again = start()
    tokens, metrics = ask(again, [*OTHER[:100], 1, 2])
    assert tokens == continuation([*OTHER[:100], 1, 2], 8)
    assert metrics.restored_tokens >= 64
    again.close()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_models_write_the_same_tokens_as_with_blocks_that_stay(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save(family, tmp_path / family)
    config = EngineConfig.of(model=str(path), kv_memory="1M", max_num_batched_tokens=64)
    model = load(path, config.model)
    prompts = [[i * i % 250 for i in range(200)], [i * 7 % 250 for i in range(90)]]
    prompts.append([*prompts[0][:150], 7, 8, 9])

    def replies(model: LoadedModel) -> tuple[list[list[int]], int]:
        engine = Engine(model, config)
        first = [ask(engine, prompt)[0] for prompt in prompts]
        engine.core.memory.tree.evict(engine.core.memory.pool.evictable // 2)
        return first + [ask(engine, prompt)[0] for prompt in prompts], engine.stats().pool.ended

    ends, count = replies(model)
    assert count > 0
    monkeypatch.setattr(profile, "groups_of", lambda model, *_: one_group(len(model.layers)))
    assert replies(model) == (ends, 0)
