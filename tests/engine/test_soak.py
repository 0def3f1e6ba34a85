"""Twenty thousand requests hold memory flat: quantized KV, ended windows, spills and restores."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import psutil
import pytest

from skim.config import EngineConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Finished
from skim.models.load import load
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import submit

REQUESTS, FEW = 20_000, 500
AT_ONCE = 16
WARM = 4_000  # requests after which allocators, caches and the checkpoint directory have grown to their size
MOST_GROWTH = 24 * 2**20  # bytes; one leaked block per request would be 20 times as much


@pytest.mark.parametrize(("family", "kv_format"), [("gemma3", "auto"), ("qwen3", "int8"), ("qwen3", "int4")])
@pytest.mark.parametrize("requests", [FEW, pytest.param(REQUESTS, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_requests(
    family: str, kv_format: str, requests: int, tmp_path: Path
) -> None:
    """Few requests only show that pool and prefix tree agree."""
    model = load(tiny.save(family, tmp_path / "model"), EngineConfig.of().model)
    config = EngineConfig.of(
        kv_memory="1M",
        kv_cache_dtype=kv_format,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        checkpoint_size="1M",
        max_num_seqs=AT_ONCE,
    )
    engine = Engine(model, config)
    rng = random.Random(0)
    documents = [[rng.randrange(256) for _ in range(120)] for _ in range(40)]
    process = psutil.Process()
    sizes: list[int] = []
    waiting: list[RequestHandle] = []
    for number in range(requests):
        document = rng.choice(documents)
        prompt = [*document[: rng.randrange(1, 120)], *(rng.randrange(256) for _ in range(8))]
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=rng.randint(1, 6), ignore_eos=True)
        waiting.append(submit(engine, prompt, params))
        if len(waiting) == AT_ONCE:
            _finish(engine, waiting)
        if number % 100 == 0:
            engine.core.memory.check()
        if number >= WARM and number % 1000 == 0:
            gc.collect()
            sizes.append(process.memory_info().rss)
    _finish(engine, waiting)
    stats = engine.stats()
    assert stats.pool.live == stats.pool.evictable, "no request holds a block"
    assert stats.checkpoints is not None
    assert min(stats.checkpoints.spills, stats.checkpoints.restores) > 0
    if requests > WARM:
        assert max(sizes[len(sizes) // 2 :]) - sizes[0] < MOST_GROWTH, sizes
    engine.close()


def _finish(engine: Engine, waiting: list[RequestHandle]) -> None:
    while engine.step():
        pass
    for handle in waiting:
        assert isinstance(list(handle)[-1], Finished)
    waiting.clear()
