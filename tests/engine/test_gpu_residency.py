"""Residency on a CUDA device: pinned copies, side streams, graphs. Run `make test-gpu`."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from skim.config import EngineConfig, ModelConfig
from skim.engine.engine import Engine
from skim.engine.turns import POLICIES, ROLES, TARGET
from skim.models.load import LoadedModel
from skim.models.residency_state import Direction, Place
from skim.models.scratch import HostCopy
from skim.models.shapes import build_shape
from skim.models.storages import Storages
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(start + 7 * i) % 1000 for i in range(length)] for start, length in ((3, 50), (5, 700), (9, 900))]
SHAPE: dict[str, Any] = {"kv_memory": "64M", "sparse_prefill": "auto", "min_prompt_tokens": 400}


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny.CONFIGS["qwen3"]()
    config.vocab_size, config.max_position_embeddings = 1024, 2048
    config.save_pretrained(path := tmp_path_factory.mktemp("shape"))
    return str(path)


def shape(config_file: str, seed: int, quantization: str = "auto") -> LoadedModel:
    config = ModelConfig(device="cuda", quantization=quantization)
    return replace(build_shape(config_file, config, seed=seed), name=f"shape-{seed}")


def engine_of(target: LoadedModel, drafter: LoadedModel | None, policy: str, **more: Any) -> Engine:
    settings = {**SHAPE, "residency": policy, "enable_prefix_caching": False, "scorer": "blend", **more}
    config = EngineConfig.of(**settings)
    if drafter is not None:
        config = replace(config, prefill=replace(config.prefill, drafter=drafter.name))
    return Engine(target, config, drafter=drafter)


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_replies_are_identical_after_any_moves_under_every_policy(
    quantization: str, config_file: str
) -> None:
    draw = random.Random(quantization)
    target, drafter = shape(config_file, 1, quantization), shape(config_file, 2, quantization)
    for policy in POLICIES:
        engine = engine_of(target, drafter, policy)
        expected = [run_together(engine, [prompt], GREEDY)[0] for prompt in PROMPTS]
        replayed = engine.stats().paths["graph"]
        for _ in range(5):
            for _ in range(draw.randrange(3)):
                to = draw.choice([Place.PARKED, Place.RELEASED])
                engine.core.residency.park(draw.sample(ROLES, draw.randrange(1, 3)), to)
            assert [run_together(engine, [prompt], GREEDY)[0] for prompt in PROMPTS] == expected
        assert engine.stats().paths["graph"] > replayed
        assert not engine.stats().prefill.fallbacks


@pytest.mark.parametrize("policy", ["keep-target", "swap"])
def test_a_drafter_that_is_parked_before_its_layers_are_compiled(policy: str, config_file: str) -> None:
    """Packing makes new weights from those that arrive: replies are those of models that never move."""
    target, drafter = shape(config_file, 1), shape(config_file, 2)
    still = engine_of(shape(config_file, 1), shape(config_file, 2), "both")
    expected = [run_together(still, [prompt], GREEDY)[0] for prompt in PROMPTS]
    drafter.residency.park()
    engine = engine_of(target, drafter, policy)
    assert [run_together(engine, [prompt], GREEDY)[0] for prompt in PROMPTS] == expected
    assert not engine.stats().prefill.fallbacks


def test_graphs_survive_if_the_addresses_do_and_are_captured_anew_if_not(config_file: str) -> None:
    engine = engine_of(shape(config_file, 3), None, "both")
    [expected] = run_together(engine, [PROMPTS[0]], GREEDY)
    residency = engine.core.residency.models[TARGET]
    others: list[torch.Tensor] = []
    for moved in (False, True):
        captures, relocations = engine.stats().paths.get("capture", 0), residency.relocations
        residency.park()
        if moved:  # someone else takes the memory
            others += [torch.empty(2**15, dtype=torch.uint8, device="cuda") for _ in range(2048)]
        assert run_together(engine, [PROMPTS[0]], GREEDY) == [expected]
        if moved:
            assert residency.relocations == relocations + 1
        again = engine.stats().paths.get("capture", 0) - captures
        assert (again > 0) is (residency.relocations > relocations)


def test_a_parked_model_is_in_pinned_memory_and_cycles_leak_nothing() -> None:
    model = build_shape("qwen3-0.6b", ModelConfig(device="cuda"))
    residency = model.residency
    size = residency.size
    with torch.inference_mode():
        expected = model.module.lm_head(torch.ones(1, 1024, device="cuda", dtype=model.dtype)).clone()
    residency.park()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    state = residency.state(TARGET)
    assert state.device_bytes == 0
    assert size <= state.host_bytes <= 1.01 * size
    for _ in range(50):
        residency.unpark()
        residency.park()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before[0]
    assert abs(torch.cuda.memory_reserved() - before[1]) <= 0.02 * size
    residency.unpark()
    with torch.inference_mode():
        again = model.module.lm_head(torch.ones(1, 1024, device="cuda", dtype=model.dtype))
    torch.cuda.synchronize()
    assert torch.equal(again, expected)
    state = residency.state(TARGET)
    assert state.last is not None
    assert (state.last.direction, state.last.bytes) == (Direction.TO_DEVICE, size)
    assert state.transfers[Direction.TO_HOST].bytes == size  # copied once


def test_host_memory_is_pinned_and_a_fill_on_a_side_stream_is_complete_after_its_event() -> None:
    copy = HostCopy([4096, 5000], pinned=True)
    assert copy.pinned
    assert all(part.is_pinned() for part in copy.parts)
    module = torch.nn.Linear(4096, 4096, device="cuda").requires_grad_(False)
    expected = module.weight.clone()
    storages = Storages.of(module)
    storages.keep_host_copy()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(10):
        storages.free()
        torch.empty(4096 * 4096, device="cuda").fill_(7)  # writes where the weight may come
        event = storages.fill(stream)
        assert event is not None
        event.wait()
        assert torch.equal(module.weight, expected)
