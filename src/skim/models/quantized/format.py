"""The one format of quantized weights: integer codes, with a scale and an offset for each group of columns.

A value is `scale * code + offset`. Codes have 4, 5, 6 or 8 bits; a group is 16, 32, 64 or 128 neighbouring
columns of one row. Scales and offsets are stored as the file had them: as floats, as zero points, or as small
integers with a common factor for every 256 columns (GGUF's K types). All of these become exact float32
numbers, so a restored weight equals the one that its file describes, bit for bit.

Codes are packed in runs of 32 columns, in up to two planes:

    low   4 bits of each code. Byte j of a run holds column j in its low bits, column j + 16 in its high bits.
          Codes of 8 bits are whole bytes, in order.
    high  5 bits: bit j of a run's 4 bytes, read as a little-endian integer, belongs to column j.
          6 bits: byte j of a run's 8 bytes holds columns j, j + 8, j + 16 and j + 24, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

RUN = 32  # columns that are packed together
SUPER = 256  # columns with one factor
BITS = (4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [rows, columns] of codes. A row is one output, a column one input."""

    bits: int
    group: int
    low: torch.Tensor
    """uint8 [rows, columns / 2], or [rows, columns] with 8 bits. float8_e4m3fn: the values themselves."""
    scale: torch.Tensor
    """[rows, columns / group]: floats, or uint8 or int8 to be multiplied by `factor`."""
    high: torch.Tensor | None = None
    """uint8 [rows, columns * (bits - 4) / 8], with 5 or 6 bits."""
    offset: torch.Tensor | None = None
    """Like `scale`. Floats are added. Integers are zero points, `scale * (code - offset)`; with a `factor`
    of two columns they are multiplied by the second one and subtracted."""
    zero: int = 0
    """The zero point of all groups, if there is no `offset`."""
    factor: torch.Tensor | None = None
    """float16 [rows, columns / 256, 1 or 2]: of scales, and of offsets."""
    order: torch.Tensor | None = None
    """int64 [columns]: column i multiplies the input `order[i]`. None: in order."""

    @property
    def rows(self) -> int:
        return self.low.shape[0]

    @property
    def columns(self) -> int:
        return self.scale.shape[1] * self.group

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by name."""
        named = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def some_rows(self, first: int, end: int) -> CodedWeight:
        """Rows `first` to `end`, sharing memory."""
        cut = {name: plane[first:end] for name, plane in self.planes.items() if name != "order"}
        return replace(self, **cut)  # type: ignore[arg-type]

    def chosen_rows(self, rows: torch.Tensor) -> CodedWeight:
        """A copy of these rows. rows: int64 [n]"""
        cut = {name: plane[rows] for name, plane in self.planes.items() if name != "order"}
        return replace(self, **cut)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> CodedWeight:
        return replace(self, **{name: plane.to(device) for name, plane in self.planes.items()})  # type: ignore[arg-type]

    # -- the plain twin of all kernels

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and offset of every group as float32. Two of [rows, groups]"""
        scale = self.scale.float()
        if self.factor is not None:
            scale = scale * self._factors(0)
        if self.offset is None:
            return scale, scale * -self.zero
        offset = self.offset.float()
        if self.factor is not None:
            return scale, offset * -self._factors(1)
        return scale, offset if self.offset.dtype.is_floating_point else scale * -offset

    def _factors(self, which: int) -> torch.Tensor:
        assert self.factor is not None
        return self.factor[:, :, which].float().repeat_interleave(SUPER // self.group, dim=1)

    def codes(self) -> torch.Tensor:
        """The codes as float32, in the order in which they are stored. [rows, columns]"""
        if self.bits == 8:
            return self.low.float()
        return unpack(self.low, self.high, self.bits).float()

    def restore_stored(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, with columns as they are stored. [rows, columns]"""
        scale, offset = self.affine()
        groups = self.codes().view(self.rows, -1, self.group)
        return torch.addcmul(offset[:, :, None], groups, scale[:, :, None]).view(self.rows, -1).to(dtype)

    def restore(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, with columns in the order of the inputs. [rows, columns]"""
        values = self.restore_stored(dtype)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)


def stacked(upper: CodedWeight, lower: CodedWeight) -> CodedWeight | None:
    """The rows of both as one weight, or None if they differ in kind or order. Copies the planes."""
    if (upper.bits, upper.group, upper.zero) != (lower.bits, lower.group, lower.zero):
        return None
    first, second = upper.planes, lower.planes
    if first.keys() != second.keys() or any(
        plane.dtype != second[name].dtype or plane.shape[1:] != second[name].shape[1:]
        for name, plane in first.items()
    ):
        return None
    if upper.order is not None and lower.order is not None and not torch.equal(upper.order, lower.order):
        return None
    joined = {name: torch.cat((first[name], second[name])) for name in first if name != "order"}
    return replace(upper, **joined)  # type: ignore[arg-type]


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack codes of 4, 5 or 6 bits. uint8 [rows, columns] -> low and high planes"""
    rows = codes.shape[0]
    runs = codes.view(rows, -1, RUN)
    lows = runs & 15
    low = (lows[..., :16] | lows[..., 16:] << 4).reshape(rows, -1)
    if bits == 4:
        return low, None
    rest = runs >> 4
    if bits == 5:
        bytes_of = rest.view(*rest.shape[:2], 4, 8)
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        return low, (bytes_of << shifts).sum(-1, dtype=torch.uint8).view(rows, -1)
    fields_of = rest.view(*rest.shape[:2], 4, 8)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)[:, None]
    return low, (fields_of << shifts).sum(-2, dtype=torch.uint8).view(rows, -1)


def unpack(low: torch.Tensor, high: torch.Tensor | None, bits: int) -> torch.Tensor:
    """The reverse of `pack`. uint8 [rows, columns]"""
    rows = low.shape[0]
    packed = low.view(rows, -1, RUN // 2)
    codes = torch.cat((packed & 15, packed >> 4), dim=-1)
    if high is not None and bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
        codes |= (high.view(rows, -1, 4, 1) >> shifts & 1).view(codes.shape) << 4
    elif high is not None:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=low.device)[:, None]
        codes |= (high.view(rows, -1, 1, 8) >> shifts & 3).view(codes.shape) << 4
    return codes.view(rows, -1)


def why_invalid(weight: CodedWeight) -> str | None:
    """Why the planes do not fit together, or None. Kernels rely on what is checked here."""
    if weight.bits not in BITS or weight.group not in GROUPS:
        return f"codes of {weight.bits} bits in groups of {weight.group}"
    if weight.scale.dim() != 2 or weight.low.dim() != 2:
        return "planes that are not matrices"
    expected = dict(_expected(weight))
    for name, plane in weight.planes.items():
        if name not in expected:
            return f"a plane {name!r} that codes of {weight.bits} bits do not have"
        shape, dtypes = expected[name]
        if tuple(plane.shape) != shape:
            return f"{name} of shape {list(plane.shape)}, not {list(shape)}"
        if plane.dtype not in dtypes:
            return f"{name} of type {plane.dtype}"
        if not plane.is_contiguous():
            return f"{name} with gaps"
    missing = [name for name in ("low", "high", "scale") if name in expected and name not in weight.planes]
    if missing:
        return f"no {missing[0]}"
    if weight.columns % RUN or (weight.factor is not None and weight.columns % SUPER):
        return f"{weight.columns} columns"
    if weight.order is not None and not torch.equal(
        weight.order.sort().values, torch.arange(weight.columns, device=weight.order.device)
    ):
        return "an order that is no permutation"
    return None


def _expected(weight: CodedWeight) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]]:
    """Shape and dtypes of every plane that this weight may have."""
    rows, columns, groups = weight.rows, weight.columns, weight.scale.shape[1]
    whole = weight.bits == 8
    lows = (torch.uint8, torch.float8_e4m3fn) if whole else (torch.uint8,)
    yield "low", ((rows, columns if whole else columns // 2), lows)
    if weight.bits in (5, 6):
        yield "high", ((rows, columns * (weight.bits - 4) // 8), (torch.uint8,))
    small = (torch.uint8, torch.int8)
    yield "scale", ((rows, groups), FLOATS if weight.factor is None else small)
    yield "offset", ((rows, groups), (*FLOATS, torch.uint8) if weight.factor is None else (torch.uint8,))
    pair = 1 if weight.offset is None else 2
    yield "factor", ((rows, columns // SUPER, pair), (torch.float16,))
    yield "order", ((columns,), (torch.int64,))
