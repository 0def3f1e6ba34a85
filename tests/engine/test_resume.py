"""Nothing computed is lost: an unfinished prompt is published up to its last finite chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.config import EngineConfig, PrefillConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Failed, Finished
from skim.memory.pool import KVPool
from skim.memory.prefix import Namespace
from skim.memory.store import LayerShape
from skim.models.load import load
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import FakeModule, continuation, fake_engine, submit

DENSE = PrefillConfig()
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SKIMMED = PrefillConfig(sparse_prefill="always", scorer="random", keep_ratio=0.75)
BLOCKSPARSE = PrefillConfig(prefill_attention="blocksparse", blocksparse_alpha=0.9)


def run(engine: Engine) -> None:
    while engine.step():
        engine.core.memory.check()


def tokens(events: list[Any]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def compute_until(engine: Engine, share: float, prompt: int) -> None:
    """Step until this share of a prompt is computed."""
    before = engine.stats().tokens_computed
    while engine.stats().tokens_computed - before < share * prompt:
        assert engine.step()
        engine.core.memory.check()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context window in which block-sparse attention selects blocks."""
    path = tiny.save("llama", tmp_path_factory.mktemp("llama"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return path


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("prefill", [DENSE, SKIMMED, BLOCKSPARSE], ids=["dense", "skimmed", "block-sparse"])
def test_a_retry_after_an_abort_at_half_of_a_prefill_computes_the_other_half(
    path: Path, prefill: PrefillConfig, ahead: bool
) -> None:
    settings = EngineConfig.of(model=str(path), device="cpu", kv_memory="16M", max_num_batched_tokens=256)
    prompt = [(i * i) % 90 + 3 for i in range(1920)]
    texts = []
    for interrupted in (True, False):
        engine = Engine(load(path, settings.model), settings)
        engine.core.overlaps = ahead
        if interrupted:
            handle = submit(engine, prompt, GREEDY, prefill=prefill)
            while not engine.core.lifecycle.sequences:
                engine.step()
            [sequence] = engine.core.lifecycle.sequences.values()
            compute_until(engine, 0.5, sequence.slots.prompt)
            handle.abort()
            run(engine)
            assert not engine.core.memory.tables
        before = engine.stats().tokens_computed
        events: list[Any] = []
        submit(engine, prompt, GREEDY, prefill=prefill, emit=events.append)
        run(engine)
        assert isinstance(events[-1], Finished)
        texts.append(tokens(events))
        metrics = events[-1].metrics
        assert (metrics.kept_tokens < len(prompt)) == (prefill is SKIMMED)
        assert (engine.stats().attention.chunks["sparse"] > 0) == (prefill is BLOCKSPARSE)
        computed = engine.stats().tokens_computed - before - 3  # the last reply token is not computed
        assert computed == metrics.kept_tokens - metrics.cached_tokens
        if interrupted:
            assert computed <= 0.55 * metrics.kept_tokens
        else:
            assert metrics.cached_tokens == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_every_abort_keeps_what_was_computed(ahead: bool) -> None:
    """Aborts after any number of steps: the retry computes the rest, up to a block, and says the same."""
    prompt = [(i * i) % 60 for i in range(90)]
    for steps in range(1, 10):
        engine = fake_engine(blocks=60, block_size=4, max_num_batched_tokens=10)
        engine.core.overlaps = ahead
        handle = submit(engine, prompt, GREEDY)
        for _ in range(steps):
            engine.step()
        handle.abort()
        engine.step()
        assert len(engine.core.memory.tree) == min(steps * 10, 90) // 4
        before = engine.stats().tokens_computed
        events: list[Any] = []
        submit(engine, prompt, GREEDY, emit=events.append)
        run(engine)
        assert engine.stats().tokens_computed - before - 3 <= 90 - steps * 10 + 4
        assert tokens(events) == continuation(prompt, 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_prefill_resumes(ahead: bool) -> None:
    engine = fake_engine(blocks=30, block_size=4, max_num_batched_tokens=10)
    engine.core.overlaps = ahead
    prompt = [(i * i) % 60 for i in range(80)]
    events: list[Any] = []
    submit(engine, prompt, GREEDY, emit=events.append)
    compute_until(engine, 0.5, 80)
    engine.core._finish()
    [sequence] = engine.core.lifecycle.sequences.values()
    engine.core.lifecycle.preempt(sequence)
    before = engine.stats().tokens_computed
    run(engine)
    assert engine.stats().tokens_computed - before - 3 == 40
    assert tokens(events) == continuation(prompt, 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_chunk_with_a_nan_and_all_after_it_are_never_published(ahead: bool) -> None:
    engine = fake_engine(blocks=60, block_size=4, max_num_batched_tokens=10)
    engine.core.overlaps = ahead
    module = engine.model.module
    assert isinstance(module, FakeModule)
    module.nan_tokens = {59}
    prompt = [i % 50 for i in range(90)]
    prompt[25] = 59  # in the third chunk
    handle = submit(engine, prompt, GREEDY)
    compute_until(engine, 0.8, 90)
    handle.abort()
    run(engine)
    assert len(engine.core.memory.tree) == 20 // 4
    events: list[Any] = []
    submit(engine, prompt, GREEDY, emit=events.append)  # its logits are finite: the fake reads keys alone
    run(engine)
    assert isinstance(events[-1], Finished)
    assert len(engine.core.memory.tree) == 20 // 4


def test_a_nan_in_one_prompt_does_not_keep_another_from_being_published() -> None:
    engine = fake_engine(blocks=90, block_size=4, max_num_batched_tokens=40)
    module = engine.model.module
    assert isinstance(module, FakeModule)
    module.nan_tokens = {59}
    handles: list[RequestHandle] = [
        submit(engine, [59, *range(50), *range(50)], GREEDY),
        submit(engine, [*range(7, 57), *range(7, 57)], GREEDY),
    ]
    compute_until(engine, 0.7, 201)
    for handle in handles:
        handle.abort()
    run(engine)
    assert engine.core.memory.match([59, *range(50)], Namespace()).length == 0
    assert engine.core.memory.match([*range(7, 57)], Namespace()).length > 0


def test_a_failed_forward_publishes_nothing_new() -> None:
    engine = fake_engine(blocks=60, block_size=4, max_num_batched_tokens=10)
    events: list[Any] = []
    submit(engine, [i % 50 for i in range(90)], GREEDY, emit=events.append)
    compute_until(engine, 0.5, 90)
    engine.model.module.fail_next = RuntimeError("a forward that fails")
    run(engine)
    assert isinstance(events[-1], Failed)
    assert len(engine.core.memory.tree) == 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_tells_which_chunks_are_finite(layer: int, bad: float) -> None:
    """The check runs in the last layer, whose keys follow from all earlier ones."""
    shape = LayerShape(kv_heads=2, key_dim=8, value_dim=8)
    pool = KVPool.of_blocks([shape] * 2, 8, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    blocks = pool.allocate(8)
    rows = (
        Row(Role.PREFILL, blocks[:3], 0, 9),
        Row(Role.DECODE, blocks[3:4], 0, 1),
        Row(Role.PREFILL, blocks[4:], 0, 12),
    )
    step = Step(pool, rows, TorchBackend(), checked=(0, 2))
    query, key, value = (torch.randn(22, 2, 8) for _ in range(3))
    value[15, 1, 3] = bad
    step.attend(layer, query, key, value, AttentionCall(1.0))
    if layer == 0:
        assert step.finite is None
    else:
        assert step.finite is not None
        assert step.finite.tolist() == [True, False]
