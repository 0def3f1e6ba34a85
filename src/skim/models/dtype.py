"""The dtype that a model computes in, by its device.

A GPU computes in bfloat16 from compute capability 8.0, in float16 below. `torch.cuda.is_bf16_supported` also
says yes to cards that emulate bfloat16, and looks at the current device, not at the chosen one.

A CPU computes in float32. In bfloat16 the default model took 2.6 times as long for a prompt with AVX2. With
AVX512-bf16 it took as long, and a token 1.7 times as long: the C kernels for few tokens compute in float32.
So bfloat16, which halves the memory, has to be asked for.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass

import torch

from skim.errors import ConfigError

log = logging.getLogger(__name__)

NATIVE_FROM = (8, 0)
"""The lowest compute capability with instructions for bfloat16."""


@dataclass(frozen=True)
class Processor:
    """The facts about a device that decide on the dtype."""

    kind: str  # "cpu" or "cuda"
    name: str
    has_bfloat16: bool  # instructions for it, not an emulation

    @classmethod
    def of_gpu(cls, name: str, capability: tuple[int, int]) -> Processor:
        named = f"{name} of compute capability {'.'.join(map(str, capability))}"
        return cls("cuda", named, capability >= NATIVE_FROM)

    @classmethod
    def of_cpu(cls, has_bfloat16: bool) -> Processor:
        return cls("cpu", "this CPU", has_bfloat16)


def processor_of(device: torch.device) -> Processor:
    """The facts about this device, whichever is current."""
    if device.type == "cuda":
        return Processor.of_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return Processor.of_cpu(_cpu_has_bfloat16(platform.machine()))


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The wanted dtype, or the device's own with `auto`. Logs a warning for one that is slow there."""
    processor = processor_of(device)
    dtype = choose_dtype(wanted, processor)
    if why := why_slow(dtype, processor):
        log.warning("%s", why)
    return dtype


def choose_dtype(wanted: str, processor: Processor) -> torch.dtype:
    """Raises ConfigError for bfloat16 on a GPU without it.

    Kernels in Triton do not compile there, and no use is lost: float16 is as small, float32 has the range.
    """
    if wanted == "auto":
        if processor.kind != "cuda":
            return torch.float32
        return torch.bfloat16 if processor.has_bfloat16 else torch.float16
    dtype: torch.dtype = getattr(torch, wanted)
    if dtype == torch.bfloat16 and processor.kind == "cuda" and not processor.has_bfloat16:
        lowest = ".".join(map(str, NATIVE_FROM))
        raise ConfigError(
            f"dtype bfloat16 needs a GPU of compute capability {lowest}, got {processor.name}; use float16, "
            "or float32 if a weight is too large for float16",
            fields="dtype",
        )
    return dtype


def why_slow(dtype: torch.dtype, processor: Processor) -> str | None:
    """A warning about a dtype that works, but is slower on this device than another; else None."""
    if dtype == torch.bfloat16 and not processor.has_bfloat16:
        return f"{processor.name} has no bfloat16 instructions, so bfloat16 is slow; float32 is faster"
    return None


def _cpu_has_bfloat16(machine: str) -> bool:
    if machine in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
