"""Quantized KV in the engine: the text does not depend on how its keys and values were computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from skim import LLM, SamplingParams
from skim.attention.step import Role, Row, Step
from skim.config import EngineConfig, PrefillConfig
from skim.engine.engine import Engine
from skim.measure.book import packaged_text
from skim.memory.formats import AUTO
from skim.memory.store import PlainStore
from skim.models.load import LoadedModel, load
from tests import tiny
from tests.fake import run_together

FORMATS = ("int8", "k8v4", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load(path, EngineConfig.of().model)


def texts(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return run_together(engine, prompts, GREEDY)


def check_every_way(model: LoadedModel, prompts: list[list[int]], **settings: Any) -> None:
    """Chunk cuts, prefix hits, company and preemption give the text of a prompt read alone and at once."""

    def engine(**more: Any) -> Engine:
        return Engine(model, EngineConfig.of(**{"kv_memory": "64M", **settings, **more}))

    whole = engine(max_num_batched_tokens=2048, enable_prefix_caching=False)
    alone = [texts(whole, [prompt])[0] for prompt in prompts]
    assert len({tuple(text) for text in alone}) > 1
    assert texts(whole, prompts) == alone, "company"
    cut = engine(max_num_batched_tokens=19)
    assert texts(cut, prompts) == alone, "chunk cuts"
    assert texts(cut, prompts) == alone, "prefix hits"
    assert cut.stats().prefix.hits >= len(prompts)
    longest = max(map(len, prompts)) + (GREEDY.max_tokens or 0)
    block = whole.core.memory.pool.block_bytes
    tight = engine(
        kv_memory=(-(-longest // 16) + 2) * block, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    assert texts(tight, prompts) == alone, "preemption"
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_text_is_the_same_however_it_was_computed(model: LoadedModel, kv_format: str, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.choice([15, 16, 20, 33]))] for _ in range(4)]
    check_every_way(model, prompts, kv_cache_dtype=kv_format)


def test_the_default_model_agrees_with_itself_however_it_was_computed(default_model_dir: Path) -> None:
    """Sums of other chunks round differently, and some codes with them: less than the format itself loses."""
    model = load(default_model_dir, EngineConfig.of().model)
    tokens = model.tokenizer.encode(packaged_text()[200_000:202_000])[:120]
    engine = Engine(model, EngineConfig.of(kv_memory="64M", kv_cache_dtype="int8"))
    found = [logits(engine, tokens, chunk) for chunk in (120, 19, 1)]
    for other in found[1:]:
        assert (other.argmax(-1) == found[0].argmax(-1)).float().mean() >= 0.95
        p, q = found[0].log_softmax(-1), other.log_softmax(-1)
        assert (p.exp() * (p - q)).sum(-1).mean() < 2e-3


@torch.inference_mode()
def logits(engine: Engine, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits after every token of a text that is read in chunks. [tokens, vocab]"""
    memory, found = engine.core.memory, []
    table = memory.open()
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        memory.extend(table, len(part))
        row = Row(Role.PREFILL, table.blocks, first, len(part))
        step = Step(memory.pool, (row,), engine.core.runner.backend)
        ids, positions = torch.tensor([part]), torch.tensor([step.positions])
        out = engine.model.module(ids, position_ids=positions, use_cache=False, skim_step=step)
        found.append(out.logits[0])
        table.length += len(part)
    memory.close(table)
    return torch.cat(found)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_skimmed_prompts_are_read_in_every_format(path: Path, kv_format: str) -> None:
    prefill = PrefillConfig(sparse_prefill="always", scorer="random", keep_ratio=0.5, prefill_block_size=8)
    prompt = [i * i % 256 for i in range(200)]
    with LLM(path, progress=False, kv_memory="8M", kv_cache_dtype=kv_format) as llm:
        one, two = (llm.generate([prompt], GREEDY, prefill=prefill, use_tqdm=False)[0] for _ in range(2))
        assert one.plan is not None
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert one.metrics.kv_format == kv_format
        assert one.metrics.kv_bytes == (one.metrics.kept_tokens + 12) * llm.stats().pool.token_bytes


def test_off_is_byte_identical(model: LoadedModel) -> None:
    """`auto` is the plain store: the planes hold exactly what the model computes."""
    prompt = [i * i % 256 for i in range(60)]
    found = []
    for settings in ({}, {"kv_cache_dtype": AUTO}):
        engine = Engine(model, EngineConfig.of(kv_memory="1M", **settings))
        pool = engine.core.memory.pool
        assert all(type(store) is PlainStore for store in pool.stores)
        text = texts(engine, [prompt])
        runs = pool.runs(range(3), 0, 48)
        found.append((text, [pool.gather(layer, runs) for layer in range(len(pool.layers))]))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert all(one.equal(other) for one, other in zip(mine, theirs, strict=True))
