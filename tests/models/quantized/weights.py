"""Random coded weights of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from skim.attention.step import AttentionCall
from skim.models.quantized.format import BITS, GROUPS, SUPER, CodedWeight, pack, why_invalid

KINDS = ("offset", "zeros", "zero", "super", "super-offset", "ordered", "fp8")


def random_weight(kind: str, bits: int, group: int, rows: int, columns: int, seed: int) -> CodedWeight:
    """A valid weight; `columns` is rounded up to what the kind allows."""
    draw = torch.Generator().manual_seed(seed)
    unit = max(SUPER if kind.startswith("super") else 32, group)
    columns = -(-columns // unit) * unit
    groups = columns // group

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    def floats(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * 0.02).to(dtype)

    codes = integers(0, 2**bits, rows, columns)
    low, high = (codes, None) if bits == 8 else pack(codes, bits)
    kept = random.Random(seed).choice([torch.float16, torch.float32])
    scale = floats(rows, groups, dtype=kept)
    offset, factor, order, zero = None, None, None, 0
    match kind:
        case "offset":
            offset = floats(rows, groups, dtype=scale.dtype)
        case "zeros":
            offset = integers(0, 2**bits, rows, groups)
        case "zero":
            zero = 2 ** (bits - 1)
        case "super":
            scale, zero = integers(-128, 128, rows, groups, dtype=torch.int8), 2 ** (bits - 1)
            factor = floats(rows, columns // SUPER, 1)
        case "super-offset":
            scale, offset = integers(0, 64, rows, groups), integers(0, 64, rows, groups)
            factor = floats(rows, columns // SUPER, 2)
        case "ordered":
            offset = integers(0, 2**bits, rows, groups)
            order = torch.randperm(columns, generator=draw)
        case "fp8":
            low, high, bits = floats(rows, columns).mul(50).to(torch.float8_e4m3fn), None, 8
    weight = CodedWeight(bits, group, low, scale, high, offset, zero, factor, order)
    assert why_invalid(weight) is None
    return weight


def shaped(bits: int, rows: int, columns: int) -> CodedWeight:
    """A weight of this shape whose rows share their memory."""
    weight = random_weight("zeros", bits, 32, 1, columns, 0)
    return replace(weight, **{name: plane.expand(rows, -1) for name, plane in weight.planes.items()})  # type: ignore[arg-type]


def every_kind(rows: int = 37, columns: int = 200) -> Iterator[tuple[str, CodedWeight]]:
    """One weight of each kind, number of bits and group."""
    for seed, kind in enumerate(KINDS):
        for bits in BITS:
            for group in GROUPS:
                yield f"{kind}-{bits}-{group}", random_weight(kind, bits, group, rows, columns, seed)


def coded_near(weight: torch.Tensor, bits: int, group: int, ordered: bool = False) -> CodedWeight:
    """A coded weight near this one, with offsets; `ordered`: with its columns in another order."""
    rows, columns = weight.shape
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0)) if ordered else None
    stored = weight if order is None else weight[:, order]
    groups = stored.detach().view(rows, -1, group)
    least, most = groups.amin(-1), groups.amax(-1)
    scale, offset = ((most - least) / (2**bits - 1)).half(), least.half()
    codes = (groups - offset.float()[..., None]) / scale.float()[..., None].clamp(min=1e-9)
    whole = codes.round().clamp(0, 2**bits - 1).to(torch.uint8).view(rows, columns)
    low, high = (whole, None) if bits == 8 else pack(whole, bits)
    return CodedWeight(bits, group, low, scale, high, offset, order=order)


class SelfAttention:
    """Stands in for a step: each token attends only to itself."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
