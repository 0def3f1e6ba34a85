"""A capped GPU, and the layers that stay on the host because they do not fit it, faked on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.attention.cpu.torch_backend import TorchBackend
from skim.config import EngineConfig, ModelConfig
from skim.engine import start
from skim.engine.fitting import place_layers
from skim.engine.graphs import StepGraphs
from skim.engine.profile import CudaMeter, pool_bytes, stores_of
from skim.engine.residency import EngineResidency
from skim.errors import ConfigError
from skim.memory.budget import GRAPH_RESERVE, TENSOR_ROUNDING, cap_gpu_memory, free_bytes, gpu_memory
from skim.memory.store import block_bytes
from skim.models.load import LoadedModel, load, use_device
from skim.models.offload import HostLayers
from tests import tiny
from tests.engine.identity import GREEDY, engine_of
from tests.fake import run_together

GIB = 2**30
MIB = 2**20
LAYERS = 4
WINDOW = 1024
CUDA = torch.device("cuda")


# -- the cap


class FakeGpu:
    """A GPU of 80 GiB. Other programs use 10 GiB, torch has reserved 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = 1.0
        self.free = 66 * GIB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", self.limit_of)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def limit_of(self, device: int) -> float:
        assert device == 1  # torch accepts no other names here
        return self.share

    def limit(self, share: float, device: int) -> None:
        assert device == 1
        self.share = share


def test_a_cap_takes_the_place_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    assert gpu_memory(CUDA) == (66 * GIB, 80 * GIB)
    assert CudaMeter(CUDA).in_use() == (14 * GIB, 80 * GIB)
    cap_gpu_memory(CUDA, 24 * GIB)
    assert gpu.share == pytest.approx(0.3)
    assert gpu_memory(CUDA) == (20 * GIB, 24 * GIB)
    assert free_bytes(CUDA) == 20 * GIB
    assert CudaMeter(CUDA).in_use() == (4 * GIB, 24 * GIB)  # of this process alone
    gpu.free = 3 * GIB  # other programs have taken more
    assert gpu_memory(CUDA) == (3 * GIB, 24 * GIB)
    cap_gpu_memory(CUDA, 100 * GIB)  # larger than the GPU: no cap
    assert gpu_memory(CUDA) == (3 * GIB, 80 * GIB)


def test_a_model_is_loaded_under_its_own_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    configs = [ModelConfig(device="cuda", memory_cap=cap) for cap in ("24G", "40G", None)]
    assert len({config.weights for config in configs}) == 3
    for config, share in zip(configs, (0.3, 0.5, 1.0), strict=True):
        assert use_device(config) == CUDA
        assert gpu.share == pytest.approx(share)


def test_a_cap_needs_a_gpu(tmp_path: Path) -> None:
    config = ModelConfig(model="tiny", device="cpu", memory_cap="24G")
    with pytest.raises(ConfigError, match=r"memory_cap '24G' limits the memory of a GPU.*cpu"):
        load(tiny.save("llama", tmp_path), config)
    for wrong in ("much", 0, -1, True):
        with pytest.raises(ConfigError, match="memory_cap must be a size"):
            ModelConfig(memory_cap=wrong)  # type: ignore[arg-type]


# -- layers on the host


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostLayers, "wanted", lambda config, device, total: HostLayers(0))
        return load(tiny.save("qwen3", tmp_path_factory.mktemp("model")), ModelConfig(model="tiny"))


class FakeMeter:
    """A device with 64 MiB of other weights, whose step takes 32 MiB. Layers on it count as in use."""

    other, step = 64 * MIB, 32 * MIB

    def __init__(self, host: HostLayers, total: int) -> None:
        self._host, self._total = host, total
        self.on_host: list[int] = []  # layers, for each measured step

    def reset(self) -> None:
        self.on_host.append(self._host.count)

    def peak(self) -> int:
        return self.step

    def in_use(self) -> tuple[int, int]:
        on_device = len(self._host.sizes) - self._host.count
        return self.other + sum(self._host.sizes[:on_device]), self._total


def kv_bytes(model: LoadedModel, tokens: int) -> int:
    return block_bytes(stores_of(model, EngineConfig.of()), 1) * tokens


def rounding(model: LoadedModel) -> int:
    return TENSOR_ROUNDING * sum(len(store.planes) for store in stores_of(model, EngineConfig.of()))


@pytest.mark.parametrize("kv", ["auto", "8M"])
@pytest.mark.parametrize("extra", [-1, 0])
@pytest.mark.parametrize("fitting", range(LAYERS + 1))
def test_the_fewest_layers_stay_on_the_host_beside_one_sequence(
    loaded: LoadedModel, fitting: int, extra: int, kv: str
) -> None:
    """A device with room for exactly so many layers, or a byte less."""
    host = loaded.host_layers
    assert host is not None
    wanted = kv_bytes(loaded, WINDOW) if kv == "auto" else 8 * MIB
    graphs = GRAPH_RESERVE if fitting == LAYERS else 0
    room = sum(host.sizes[:fitting]) + graphs + extra
    total = FakeMeter.other + FakeMeter.step + rounding(loaded) + wanted + room
    config = EngineConfig.of(
        offload_layers="auto", gpu_memory_utilization=1.0, max_num_batched_tokens=64, kv_memory=kv
    )
    meter = FakeMeter(host, total)
    place_layers(loaded, config.model)
    if fitting == 0 and extra < 0 and kv == "auto":
        with pytest.raises(ConfigError, match=r"too little memory for a KV pool.*offload_layers"):
            pool_bytes(loaded, config, WINDOW, meter, backend=TorchBackend())
        return
    budget = pool_bytes(loaded, config, WINDOW, meter, backend=TorchBackend())
    assert meter.on_host == [LAYERS]  # the step is measured with all layers on the host
    on_device = max(0, fitting + extra)
    assert host.count == LAYERS - on_device
    if kv == "auto":
        assert budget >= wanted
        left = total - meter.in_use()[0] - FakeMeter.step - rounding(loaded)
        assert budget == left - (0 if host.count else GRAPH_RESERVE)  # no byte is wasted
    else:
        assert budget == 8 * MIB


def test_a_set_number_of_layers_is_placed_and_sized_as_usual(loaded: LoadedModel) -> None:
    host = loaded.host_layers
    assert host is not None
    for count in (3, 0):
        config = EngineConfig.of(offload_layers=count, gpu_memory_utilization=1.0, max_num_batched_tokens=64)
        place_layers(loaded, config.model)
        meter = FakeMeter(host, 2 * GIB)
        budget = pool_bytes(loaded, config, WINDOW, meter, backend=TorchBackend())
        assert meter.on_host == [count] == [host.count]
        graphs = 0 if count else GRAPH_RESERVE
        assert budget == 2 * GIB - meter.in_use()[0] - FakeMeter.step - rounding(loaded) - graphs


def test_layers_that_move_end_the_graphs_of_an_earlier_engine(loaded: LoadedModel) -> None:
    place_layers(loaded, ModelConfig(offload_layers=0))
    engine = engine_of(loaded)
    dropped: list[int] = []
    engine.core.residency._relocated = lambda: dropped.append(loaded.layers_on_host)
    expected = run_together(engine, [[1, 2, 3]], GREEDY)
    place_layers(loaded, ModelConfig(offload_layers=0))
    run_together(engine, [[1, 2, 3]], GREEDY)
    assert not dropped  # nothing moved
    engine.core.runner.graphs = StepGraphs.__new__(StepGraphs)  # using it would fail
    engine.core.runner.paths.clear()
    place_layers(loaded, ModelConfig(offload_layers=2))
    assert run_together(engine, [[1, 2, 3]], GREEDY) == expected
    assert dropped == [2]
    assert set(engine.stats().paths) == {"offload"}


def test_a_model_that_was_loaded_as_a_whole_has_no_layers_on_the_host(loaded: LoadedModel) -> None:
    whole = replace(loaded, host_layers=None)
    place_layers(whole, ModelConfig())
    with pytest.raises(ConfigError, match="was loaded as a whole; load it with offload_layers auto"):
        place_layers(whole, ModelConfig(offload_layers="auto"))


@pytest.mark.parametrize(("count", "graphs"), [(0, True), (1, False)])
def test_steps_with_layers_on_the_host_are_not_captured(
    loaded: LoadedModel, count: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capturable(TorchBackend):
        pass

    made: list[Any] = []
    monkeypatch.setattr(start, "CapturableBackend", Capturable)
    monkeypatch.setattr(start, "StepGraphs", lambda *_, **__: made.append(1))
    monkeypatch.setattr(start, "compile_layers", lambda module: None)
    monkeypatch.setattr(start, "_run_first", lambda *_: None)
    config = EngineConfig.of(offload_layers=count, kv_memory="8M")
    on_gpu = replace(loaded, device=CUDA)
    monkeypatch.setattr(start, "make_pool", lambda *_, **__: None)
    residency = EngineResidency(on_gpu)
    start.make_runner(on_gpu, config, WINDOW, residency, backend=Capturable())
    assert on_gpu.layers_on_host == count
    assert bool(made) is graphs
