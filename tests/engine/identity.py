"""Engines must write what dense decode writes: alone, together, and when memory is short."""

from __future__ import annotations

from typing import Any

from skim.config import EngineConfig
from skim.engine.engine import Engine
from skim.models.load import LoadedModel
from skim.sampling.params import SamplingParams
from tests.fake import run_together

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=40, ignore_eos=True)


def engine_of(model: LoadedModel, **settings: Any) -> Engine:
    return Engine(model, EngineConfig.of(**{"kv_memory": "64M", **settings}))


def check_identity(
    model: LoadedModel, prompts: list[list[int]], params: SamplingParams, settings: dict[str, Any]
) -> tuple[Engine, Engine]:
    """Compare with dense decode. Returns the engine with room for all, and one that preempted."""
    alone = [
        run_together(engine_of(model, **settings | {"slow_fast": "off"}), [prompt], params)[0]
        for prompt in prompts
    ]
    engine = engine_of(model, **settings)
    assert run_together(engine, prompts[:1], params) == alone[:1]
    assert run_together(engine, prompts, params) == alone
    pool = engine.core.memory.pool
    blocks = sum(pool.geometry.blocks_of(len(prompt)) for prompt in prompts) + len(pool.groups)
    for share in (1, 0.8, 0.6):
        memory = int(share * blocks) * pool.block_bytes
        small = engine_of(model, **settings, kv_memory=memory, enable_prefix_caching=False)
        assert run_together(small, prompts, params) == alone
        if small.stats().preemptions:
            break
    assert small.stats().preemptions
    return engine, small
