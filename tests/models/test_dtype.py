"""The dtype follows the chosen device."""

from __future__ import annotations

import logging

import pytest
import torch

from skim.config import ModelConfig
from skim.errors import ConfigError
from skim.models.dtype import Processor, _cpu_has_bfloat16, choose_dtype, pick_dtype, processor_of, why_slow
from skim.models.load import pick_device

PROCESSORS = {
    "7.0": Processor.of_gpu("V100", (7, 0)),
    "7.5": Processor.of_gpu("T4", (7, 5)),
    "8.0": Processor.of_gpu("A100", (8, 0)),
    "8.9": Processor.of_gpu("L4", (8, 9)),
    "9.0": Processor.of_gpu("H200", (9, 0)),
    "10.0": Processor.of_gpu("B200", (10, 0)),
    "cpu": Processor.of_cpu(has_bfloat16=False),
    "cpu with bfloat16": Processor.of_cpu(has_bfloat16=True),
}
CHOSEN = {  # processor: the dtype of auto, whether bfloat16 is "native", "slow" or "refused"
    "7.0": (torch.float16, "refused"),
    "7.5": (torch.float16, "refused"),
    "8.0": (torch.bfloat16, "native"),
    "8.9": (torch.bfloat16, "native"),
    "9.0": (torch.bfloat16, "native"),
    "10.0": (torch.bfloat16, "native"),
    "cpu": (torch.float32, "slow"),
    "cpu with bfloat16": (torch.float32, "native"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_dtype_of_every_processor(name: str) -> None:
    processor, (auto, bfloat16) = PROCESSORS[name], CHOSEN[name]
    assert choose_dtype("auto", processor) == auto
    assert why_slow(auto, processor) is None, "a default is never slow"
    for other in (torch.float16, torch.float32):
        assert choose_dtype(str(other).removeprefix("torch."), processor) == other
        assert why_slow(other, processor) is None
    if bfloat16 == "refused":
        with pytest.raises(
            ConfigError, match=rf"capability 8\.0, got .* {name}; use float16, or float32"
        ) as caught:
            choose_dtype("bfloat16", processor)
        assert caught.value.fields == ("dtype",)
    else:
        assert choose_dtype("bfloat16", processor) == torch.bfloat16
        assert bool(why_slow(torch.bfloat16, processor)) == (bfloat16 == "slow")


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0)])
def test_the_chosen_device_decides_and_not_the_current_one(
    old: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One card of capability 7.5 and one of 9.0. Asking the current device, or for an emulation, fails."""

    def forbidden(*_: object, **__: object) -> bool:
        raise AssertionError

    cards = {old: ("T4", (7, 5)), new: ("H200", (9, 0))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", forbidden)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", forbidden)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards[device.index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: cards[device.index][1])
    for index, dtype in ((old, torch.float16), (new, torch.bfloat16)):
        assert pick_dtype("auto", pick_device(f"cuda:{index}")) == dtype
    with pytest.raises(ConfigError, match=r"got T4 of compute capability 7\.5"):
        pick_dtype("bfloat16", pick_device(f"cuda:{old}"))
    with pytest.raises(ConfigError, match="'cuda:2' was requested, but torch finds 2 CUDA devices"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("machine", "avx512", "amx", "arm", "found"),
    [
        ("x86_64", False, False, True, False),  # oneDNN counts emulation on x86
        ("x86_64", True, False, False, True),
        ("x86_64", False, True, False, True),
        ("aarch64", False, False, True, True),
        ("arm64", True, True, False, False),
    ],
)
def test_a_cpu_has_bfloat16_if_it_has_instructions(
    machine: str, avx512: bool, amx: bool, arm: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: arm)
    assert _cpu_has_bfloat16(machine) == found


def test_a_slow_dtype_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = pick_device("cpu")
    assert isinstance(processor_of(cpu).has_bfloat16, bool), "torch answers"
    for has in (True, False):
        monkeypatch.setattr("skim.models.dtype._cpu_has_bfloat16", lambda machine, has=has: has)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert pick_dtype("bfloat16", cpu) == torch.bfloat16
            assert pick_dtype(ModelConfig().dtype, cpu) == torch.float32
        assert ("float32 is faster" in caplog.text) == (not has)
