"""The pool's size on a CUDA device: within its share, with room for the largest step. Run `make test-gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skim.config import EngineConfig, ModelConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.profile import CudaMeter
from skim.engine.sequence import Event, Failed, Finished
from skim.errors import ConfigError
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape
from skim.sampling.params import SamplingParams
from tests.fake import submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLACK = 64 * 2**20  # kernels that are loaded later, and other processes on the device


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return build_shape("qwen3-0.6b", ModelConfig(device="cuda"))


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def used_and_total() -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info()
    return total - free, total


def share_for(model: LoadedModel, gib: float) -> float:
    """The share of the device that leaves about `gib` GiB beyond the memory in use."""
    used, total = used_and_total()
    return (used + gib * 2**30) / total


def test_the_meter_counts_temporary_memory_and_not_earlier_allocations() -> None:
    before = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    meter = CudaMeter(torch.device("cuda"))
    meter.reset()
    temporary = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    del temporary
    assert meter.peak() == 256 * 2**20
    used, total = meter.in_use()
    assert before.nbytes <= used <= total
    meter.reset()
    assert meter.peak() == 0


@pytest.mark.parametrize("extra", [{}, {"sparse_prefill": "auto", "scorer": "self"}])
def test_memory_stays_within_the_share_after_start_and_after_full_steps(
    model: LoadedModel, extra: dict[str, Any]
) -> None:
    share = share_for(model, gib=16)
    config = EngineConfig.of(gpu_memory_utilization=share, device="cuda", **extra)
    engine = Engine(model, config)
    used, total = used_and_total()
    pool = engine.stats().pool
    assert pool.reserved_bytes == pool.capacity * pool.block_bytes  # all of it is allocated at start
    assert pool.reserved_bytes > 2 * 2**30
    assert used <= share * total + SLACK

    budget = engine.core.limits.tokens
    assert budget == 8192
    demanding = SamplingParams(
        top_p=0.8, repetition_penalty=1.2, logprobs=20, max_tokens=3, ignore_eos=True, seed=1
    )
    vocabulary = model.vocab_size
    prompts = [[(7 * i + j) % vocabulary for j in range(3 * budget if i == 0 else 300)] for i in range(64)]
    handles = [submit(engine, prompt, demanding) for prompt in prompts]
    most_tokens = before = 0
    while engine.step():
        now = engine.stats().tokens_computed
        most_tokens, before = max(most_tokens, now - before), now
    events = [handle.events.get() for handle in handles for _ in range(handle.events.qsize())]
    assert [event for event in events if isinstance(event, Failed)] == []
    assert sum(isinstance(event, Finished) for event in events) == 64
    if not extra:
        assert most_tokens == budget
    used, total = used_and_total()  # torch's cache counts as used, so this is the peak
    assert used <= share * total + SLACK


def test_kv_memory_overrides_the_share_and_is_refused_if_too_large(model: LoadedModel) -> None:
    engine = Engine(model, EngineConfig.of(kv_memory="256M", gpu_memory_utilization=0.01, device="cuda"))
    pool = engine.stats().pool
    assert 0 <= 256 * 2**20 - pool.capacity * pool.block_bytes < pool.block_bytes
    with pytest.raises(ConfigError, match=r"does not fit cuda.*lower kv_memory"):
        Engine(model, EngineConfig.of(kv_memory="4T", device="cuda"))


def test_too_small_a_share_is_refused_with_figures(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"are in use by weights.*raise gpu_memory_utilization"):
        Engine(model, EngineConfig.of(gpu_memory_utilization=0.001, device="cuda"))
    share = share_for(model, gib=0.9)  # above zero, but less than a step needs
    with pytest.raises(ConfigError, match="the largest step or scoring takes"):
        Engine(
            model, EngineConfig.of(gpu_memory_utilization=share, max_num_batched_tokens=65536, device="cuda")
        )


def test_running_out_of_memory_fails_only_the_large_request(model: LoadedModel) -> None:
    engine = Engine(model, EngineConfig.of(kv_memory="1G", device="cuda", enable_prefix_caching=False))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def finish(*handles: RequestHandle) -> list[Event]:
        """Run all requests and return the last event of each."""
        while engine.step():
            engine.core.memory.check()
        assert not engine.core.memory.tables
        return [[handle.events.get() for _ in range(handle.events.qsize())][-1] for handle in handles]

    small, large = range(100), range(8000)
    assert isinstance(finish(submit(engine, list(small), params))[0], Finished)  # captures its graph
    beside = submit(engine, list(small), params)
    for _ in range(5):
        engine.step()
    unlucky = submit(engine, list(large), params)
    torch.cuda.empty_cache()
    _, total = used_and_total()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * 2**20) / total)
    try:
        whole, failed = finish(beside, unlucky)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(failed, Failed)
    assert "out of memory" in str(failed.error)
    assert isinstance(whole, Finished)
    assert whole.metrics.generated_tokens == 40
    again = finish(submit(engine, list(large), params))[0]
    assert isinstance(again, Finished)
    assert again.metrics.generated_tokens == 40
