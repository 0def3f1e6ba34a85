"""Layers on the host: any number of them computes the same, and at most two are on the device.

The device is the CPU here: its layers are freed and filled like a GPU's.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim.config import EngineConfig, ModelConfig
from skim.errors import ConfigError, ModelError, ParkedError
from skim.models.fingerprint import fingerprint
from skim.models.forwards.compiled import compile_layers
from skim.models.forwards.lean import Lean, lean_layers
from skim.models.load import load
from skim.models.offload import HostLayers, layers_of, layers_to_offload
from skim.models.residency_state import Place
from skim.models.shapes import build_shape
from skim.models.sizes import weights_of
from skim.models.storages import Storages
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.engine.identity import engine_of
from tests.fake import run_together

LAYERS = 4
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def on_host(module: Any, *, pack: bool = False) -> HostLayers:
    """The layers of a module that was loaded as a whole, all of them on the host."""
    host = HostLayers(0, pack=pack)
    for layer in layers_of(module):
        host.add(layer)
    host.finish(module, "tiny")
    return host


def resident(host: HostLayers) -> list[int]:
    return [index for index, storages in enumerate(host._layers) if storages.resident]


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded with their layers on the host, on the CPU too."""
    monkeypatch.setattr(HostLayers, "wanted", lambda config, device, total: HostLayers(0))


# -- how many


@pytest.mark.parametrize(
    ("sizes", "room", "reserve", "count"),
    [
        ([10, 10, 10, 10], 40, 0, 0),  # all fit
        ([10, 10, 10, 10], 40, 1, 1),  # but not with graphs, which layers on the host do without
        ([10, 10, 10, 10], 39, 0, 1),
        ([10, 10, 10, 10], 30, 0, 1),
        ([10, 10, 10, 10], 29, 0, 2),
        ([10, 10, 10, 10], 10, 5, 3),
        ([10, 10, 10, 10], 9, 0, 4),
        ([10, 10, 10, 10], 0, 0, 4),
        ([10, 10, 10, 10], -5, 0, 4),
        ([30, 5, 5], 12, 0, 3),  # the first layers are those on the device
        ([5, 5, 30], 12, 0, 1),
    ],
)
def test_the_fewest_layers_stay_on_the_host(sizes: list[int], room: int, reserve: int, count: int) -> None:
    assert layers_to_offload(sizes, room, reserve) == count


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(-20, 300), st.integers(0, 20))
def test_one_layer_less_on_the_host_would_not_fit(sizes: list[int], room: int, reserve: int) -> None:
    count = layers_to_offload(sizes, room, reserve)

    def fits(count: int) -> bool:
        return sum(sizes[: len(sizes) - count]) + (0 if count else reserve) <= room

    assert fits(count) or count == len(sizes)
    assert not count or not fits(count - 1)


# -- the same results


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_any_number_of_layers_computes_the_same(family: str) -> None:
    module = tiny.with_our_attention(family)
    expected = tiny.logits(module, 9)
    host = on_host(module)
    for count in (4, 0, 1, 3, 2, 4):
        host.keep(count)
        assert host.count == count
        assert torch.equal(tiny.logits(module, 9), expected)
        assert resident(host) == list(range(LAYERS - count))  # between forwards none of the others


@pytest.mark.parametrize("pack", [False, True])
def test_lean_forwards_compute_the_same(pack: bool) -> None:
    """Packed before the trial or by it. A lean forward holds weights directly."""
    module = tiny.with_our_attention("qwen3")
    if not pack:
        assert lean_layers(module) == LAYERS
    host = on_host(module, pack=pack)
    assert lean_layers(module) == LAYERS
    assert all(isinstance(layer.forward, Lean) for layer in layers_of(module))
    host.keep(0)
    expected = tiny.logits(module, 9), tiny.logits(module, 1)
    for count in range(1, LAYERS + 1):
        host.keep(count)
        assert torch.equal(tiny.logits(module, 9), expected[0])
        assert torch.equal(tiny.logits(module, 1), expected[1])


@pytest.mark.parametrize("before", [True, False])
def test_compiled_layers_stream_whether_compiled_before_or_after(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook would be compiled with its layer, or ignored if it is added later."""
    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compile_with(self, backend="eager"))
    module = tiny.with_our_attention("llama")
    expected = tiny.logits(module, 9)
    if before:
        compile_layers(module)
        tiny.logits(module, 9)
    host = on_host(module, pack=True)
    compile_layers(module)
    for count in (4, 2):
        host.keep(count)
        torch.testing.assert_close(tiny.logits(module, 9), expected, rtol=1e-5, atol=1e-5)
        assert resident(host) == list(range(LAYERS - count))


def saved(path: Path, **changes: Any) -> Path:
    module = tiny.build("qwen3")
    if changes.get("tie_word_embeddings"):
        module.config.tie_word_embeddings = True
        module.tie_weights()
    module.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(("quantization", "tied"), [("auto", False), ("auto", True), ("int4", True)])
def test_engines_write_the_same(quantization: str, tied: bool, tmp_path: Path, any_device: None) -> None:
    """Dense and skimmed prompts, chunks, decode rows and fast steps."""
    path = saved(tmp_path, tie_word_embeddings=tied)
    model = load(path, ModelConfig(model="tiny", quantization=quantization))
    generator = random.Random(3)
    prompts = [[generator.randrange(250) for _ in range(length)] for length in (300, 90, 170)]
    modes: dict[str, dict[str, Any]] = {
        "dense": {"max_num_batched_tokens": 128},
        "skimmed": {"sparse_prefill": "always", "scorer": "attention", "keep_ratio": 0.5},
        "slow-fast": {"slow_fast": "on", "decode_budget": 64, "refresh_interval": 4},
    }
    for settings in modes.values():
        expected = run_together(engine_of(model, **settings), prompts, GREEDY)
        assert model.layers_on_host == 0
        for count in (1, LAYERS - 1, LAYERS):
            engine = engine_of(model, offload_layers=count, **settings)
            assert model.layers_on_host == count
            assert run_together(engine, prompts, GREEDY) == expected
            engine.core.memory.check()
            assert set(engine.stats().paths) == {"offload"}


def test_sizes_and_identity_do_not_depend_on_the_place_of_layers(tmp_path: Path, any_device: None) -> None:
    model = load(saved(tmp_path, tie_word_embeddings=True), ModelConfig(model="tiny"))
    assert model.host_layers is not None
    found = set()
    for count in (LAYERS, 0, 2):
        model.host_layers.keep(count)
        found.add((weights_of(model.module), fingerprint(model)))
        assert resident(model.host_layers) == list(range(LAYERS - count))
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(3))
def test_parking_and_layers_on_the_host_do_not_disturb_each_other(
    seed: int, tmp_path: Path, any_device: None
) -> None:
    """Random sequences: parks, unparks, other numbers of layers, requests."""
    model = load(saved(tmp_path), ModelConfig(model="tiny"))
    draw = random.Random(seed)
    prompts = [[draw.randrange(250) for _ in range(90)]]
    engine = engine_of(model)
    expected = run_together(engine, prompts, GREEDY)
    host = model.host_layers
    assert host is not None
    others = model.residency.device_bytes - sum(storages.bytes for storages in host._layers)
    for _ in range(12):
        match draw.choice(["park", "release", "place", "run"]):
            case "park" | "release" as to:
                model.residency.park(Place.PARKED if to == "park" else Place.RELEASED)
                assert model.residency.device_bytes == 0
                with pytest.raises(ParkedError):
                    tiny.logits(model.module, 3)
                model.residency.unpark()
            case "place":
                engine = engine_of(model, offload_layers=draw.randrange(LAYERS + 1))
            case _:
                assert run_together(engine, prompts, GREEDY) == expected
        assert resident(host) == list(range(LAYERS - host.count))
        on_device = sum(storages.bytes for storages in host._layers[: LAYERS - host.count])
        assert model.residency.device_bytes == others + on_device
        assert model.residency.state("target").host_bytes >= host.host_bytes
    assert run_together(engine, prompts, GREEDY) == expected


# -- memory


class Watcher(tiny.CausalStep):
    """Counts the layers on the device while each computes. May fail in one of them."""

    def __init__(self, host: HostLayers, fails_in: int | None = None) -> None:
        self._host, self._fails_in = host, fails_in
        self.seen: list[list[int]] = []

    def attend(self, layer: int, *given: Any) -> torch.Tensor:
        self.seen.append(resident(self._host))
        if layer == self._fails_in:
            raise RuntimeError("no")
        return super().attend(layer, *given)


def forward(module: Any, step: Any) -> torch.Tensor:
    ids, positions = torch.arange(65, 74)[None], torch.arange(9)[None]
    with torch.inference_mode():
        out = module(input_ids=ids, position_ids=positions, use_cache=False, skim_step=step)
    return out.logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", range(LAYERS + 1))
def test_at_most_two_layers_of_the_host_are_on_the_device(count: int) -> None:
    module = tiny.with_our_attention("llama")
    host = on_host(module)
    host.keep(count)
    watcher = Watcher(host)
    forward(module, watcher)
    first = LAYERS - count
    for layer, seen in enumerate(watcher.seen):
        ahead = range(max(layer, first), min(layer + 2, LAYERS))
        assert seen == [*range(first), *ahead]  # this one and the next


@pytest.mark.parametrize(("count", "fails_in"), list(itertools.product((2, 4), range(LAYERS))))
def test_a_failure_in_a_layer_leaves_nothing_behind(count: int, fails_in: int) -> None:
    module = tiny.with_our_attention("llama")
    expected = tiny.logits(module, 9)
    host = on_host(module)
    host.keep(count)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            forward(module, Watcher(host, fails_in))
        assert resident(host) == list(range(LAYERS - count))
        assert torch.equal(forward(module, tiny.CausalStep()), expected)


@pytest.mark.parametrize("failing", range(2 * LAYERS - 1))
def test_running_out_of_memory_for_a_layer_leaves_nothing_behind(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny.with_our_attention("llama")
    expected = tiny.logits(module, 9)
    host = on_host(module)
    fill: Callable[..., Any] = Storages.fill
    calls = itertools.count()

    def fail_once(self: Storages, *given: Any) -> Any:
        if next(calls) == failing:
            raise torch.OutOfMemoryError("no more")
        return fill(self, *given)

    monkeypatch.setattr(Storages, "fill", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        forward(module, tiny.CausalStep())
    assert resident(host) == []
    assert torch.equal(forward(module, tiny.CausalStep()), expected)
    assert resident(host) == []


def test_layers_that_do_not_fit_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.with_our_attention("llama")
    expected = tiny.logits(module, 9)
    host = on_host(module)
    fill: Callable[..., Any] = Storages.fill

    def fail_third(self: Storages, *given: Any) -> Any:
        if self is host._layers[2]:
            raise torch.OutOfMemoryError("no more")
        return fill(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Storages, "fill", fail_third)
        with pytest.raises(torch.OutOfMemoryError):
            host.keep(0)
    assert host.count == 2
    assert torch.equal(tiny.logits(module, 9), expected)


def test_the_copy_on_the_host_ends_when_a_layer_stays_on_the_device() -> None:
    module = tiny.with_our_attention("llama")
    host = on_host(module)
    size = host._layers[0].bytes
    for count in (4, 1, 3, 0):
        host.keep(count)
        assert host.host_bytes >= count * size
        assert sum(storages.host_bytes > 0 for storages in host._layers) == count


# -- loading


def layers_while_loading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each layer that is added: layers with weights at that time."""
    seen: list[int] = []
    add = HostLayers.add

    def watch(self: HostLayers, layer: Any) -> None:
        seen.append(1 + len(resident(self)))
        assert all(tensor.untyped_storage().nbytes() for tensor in layer.parameters())
        add(self, layer)

    monkeypatch.setattr(HostLayers, "add", watch)
    return seen


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])  # of the latter, transformers merges weights
def test_a_model_is_loaded_layer_by_layer(
    family: str, quantization: str, tmp_path: Path, any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save(family, tmp_path)
    seen = layers_while_loading(monkeypatch)
    model = load(path, ModelConfig(model="tiny", quantization=quantization))
    assert seen == [1] * LAYERS
    monkeypatch.undo()
    whole = load(path, ModelConfig(model="tiny", quantization=quantization))
    expected = tiny.logits(whole.module, 9)
    torch.testing.assert_close(tiny.logits(model.module, 9), expected, rtol=1e-5, atol=1e-5)
    assert model.layers == whole.layers


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_a_shape_is_built_layer_by_layer(
    quantization: str, tmp_path: Path, any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["qwen3"]().to_dict()))
    seen = layers_while_loading(monkeypatch)
    model = build_shape(str(tmp_path), ModelConfig(quantization=quantization))
    assert seen == [1] * LAYERS
    assert model.layers_on_host == LAYERS
    assert bool(torch.isfinite(tiny.logits(model.module, 9)).all())


def test_layers_that_share_weights_are_refused() -> None:
    module = tiny.with_our_attention("llama")
    layers = layers_of(module)
    layers[2].mlp.up_proj = layers[0].mlp.up_proj
    with pytest.raises(ModelError, match="share weights"):
        on_host(module)


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"offload_layers": 2}, "cpu", "offload_layers 2 needs a GPU, and the device is cpu"),
        ({"offload_layers": "auto"}, "cpu", "offload_layers auto needs a GPU"),
        ({"offload_layers": 5}, "cuda", "offload_layers 5 is more than the 4 layers of the model"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostLayers.wanted(ModelConfig(**settings), torch.device(device), LAYERS)


@pytest.mark.parametrize("value", [-1, 1.5, True, "some", "2"])
def test_other_numbers_of_layers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="offload_layers must be a number of layers or auto"):
        ModelConfig(offload_layers=value)


def test_a_drafter_stays_on_the_device_as_a_whole() -> None:
    config = EngineConfig.of(offload_layers="auto", memory_cap="12G")
    drafter = config.drafter_model("other")
    assert (drafter.offload_layers, drafter.memory_cap) == (0, "12G")
    assert HostLayers.wanted(drafter, CPU, LAYERS) is None
