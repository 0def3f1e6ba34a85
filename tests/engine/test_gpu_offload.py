"""A capped GPU, and layers that come from the host in every step. Run `make test-gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from skim.config import EngineConfig, ModelConfig
from skim.engine.engine import Engine
from skim.memory.budget import cap_gpu_memory, gpu_memory
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape
from skim.sampling.params import SamplingParams
from tests.fake import run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = 28
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 5000 for j in range(length)] for i, length in enumerate((3000, 40, 700))]


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
    cap_gpu_memory(torch.device("cuda"), 2**50)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_shape("qwen3-0.6b", ModelConfig(device="cuda", offload_layers=LAYERS))
    peak = torch.cuda.max_memory_allocated() - before
    assert model.host_layers is not None
    embedding = 151936 * 1024 * 2
    assert peak < embedding + 5 * model.host_layers.sizes[0]  # never all of its layers, packing included
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_any_number_of_layers_writes_the_same(model: LoadedModel, eager: bool) -> None:
    settings = {"kv_memory": "1G", "device": "cuda", "enforce_eager": eager, "max_num_batched_tokens": 1024}
    written = []
    for count in (LAYERS, 1, 13, 0):
        engine = Engine(model, EngineConfig.of(offload_layers=count, **settings))  # type: ignore[arg-type]
        used = torch.cuda.memory_allocated()
        written.append(run_together(engine, PROMPTS, GREEDY))
        torch.cuda.synchronize()
        assert model.host_layers is not None
        assert torch.cuda.memory_allocated() < used + model.host_layers.sizes[0]  # between steps none is here
        if count:
            assert set(engine.stats().paths) == {"offload"}
        elif not eager:
            assert engine.stats().paths.get("graph", 0) + engine.stats().paths.get("capture", 0) > 0
        del engine
        gc.collect()
    assert written[0] == written[1] == written[2]
    if eager:
        assert written[3] == written[0]  # graphs may compute padded rows with other kernels


def test_a_cap_is_a_hard_limit() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    cap_gpu_memory(device, torch.cuda.memory_reserved() + 2**30)
    assert gpu_memory(device)[0] <= 2**30 + 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, dtype=torch.uint8, device=device)
    assert torch.empty(2**29, dtype=torch.uint8, device=device).nbytes == 2**29


def test_the_fewest_layers_stay_on_the_host_of_a_small_gpu(model: LoadedModel) -> None:
    """Keys and values take 0.9 GiB, and all layers 0.8 GiB."""
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    cap_gpu_memory(device, torch.cuda.memory_reserved() + int(2.5 * 2**30))
    config = EngineConfig.of(
        offload_layers="auto",
        device="cuda",
        max_model_len=8192,
        gpu_memory_utilization=1.0,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
    )
    engine = Engine(model, config)
    assert engine.core.memory.pool.token_capacity >= 8192
    assert len(run_together(engine, [[1 + i % 5000 for i in range(8000)]], GREEDY)[0]) == 8
    assert torch.cuda.max_memory_reserved() <= gpu_memory(device)[1]
