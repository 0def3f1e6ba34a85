"""GGUF's quantized blocks as coded weights.

Codes, scales and offsets are moved, never computed, so a dequantized weight has the values of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from skim.models.quantized.format import CodedWeight, pack

_AT_ONCE = 2**22  # bytes of blocks that are unpacked together
_Blocks = torch.Tensor  # uint8 [rows, blocks, bytes of a block]


def covers(kind: int) -> bool:
    """True if tensors of this ggml type become coded weights."""
    return kind in _READERS


def coded(fetch: Callable[[int, int], torch.Tensor], kind: int, shape: tuple[int, int]) -> CodedWeight:
    """The weight in a tensor's bytes, some rows at a time.

    fetch: returns the bytes from one place to another, as uint8; shape: rows and columns
    """
    columns, nbytes, read = _READERS[kind]
    rows, row = shape[0], shape[1] // columns * nbytes
    some = max(1, _AT_ONCE // row)
    planes: dict[str, torch.Tensor] = {}
    for first in range(0, rows, some):
        end = min(first + some, rows)
        part = read(fetch(first * row, end * row).view(end - first, -1, nbytes))
        for name, plane in part.planes.items():
            if name not in planes:
                planes[name] = plane.new_empty(rows, *plane.shape[1:])
            planes[name][first:end] = plane
    return replace(part, **planes)  # type: ignore[arg-type]


def _q4_0(blocks: _Blocks) -> CodedWeight:
    return CodedWeight(4, 32, _bytes(blocks, 2, 18), _halves(blocks, 0), zero=8)


def _q4_1(blocks: _Blocks) -> CodedWeight:
    return CodedWeight(4, 32, _bytes(blocks, 4, 20), _halves(blocks, 0), offset=_halves(blocks, 2))


def _q5_0(blocks: _Blocks) -> CodedWeight:
    high = _bytes(blocks, 2, 6)
    return CodedWeight(5, 32, _bytes(blocks, 6, 22), _halves(blocks, 0), high, zero=16)


def _q5_1(blocks: _Blocks) -> CodedWeight:
    high = _bytes(blocks, 4, 8)
    return CodedWeight(5, 32, _bytes(blocks, 8, 24), _halves(blocks, 0), high, _halves(blocks, 2))


def _q8_0(blocks: _Blocks) -> CodedWeight:
    return CodedWeight(8, 32, _bytes(blocks, 2, 34) ^ 0x80, _halves(blocks, 0), zero=128)


def _q4_k(blocks: _Blocks) -> CodedWeight:
    low, _ = pack(_nibbles(blocks[:, :, 16:144], 32), 4)
    scale, offset = _six_bits(blocks[:, :, 4:16])
    return CodedWeight(4, 32, low, scale, offset=offset, factor=_factors(blocks, 0, 2))


def _q5_k(blocks: _Blocks) -> CodedWeight:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]  # bit i of byte j: column 32 * i + j
    high = blocks[:, :, None, 16:48] >> shifts & 1
    codes = _nibbles(blocks[:, :, 48:176], 32) | high.reshape(blocks.shape[0], -1) << 4
    low, rest = pack(codes, 5)
    scale, offset = _six_bits(blocks[:, :, 4:16])
    return CodedWeight(5, 32, low, scale, rest, offset, factor=_factors(blocks, 0, 2))


def _q6_k(blocks: _Blocks) -> CodedWeight:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]  # four columns, 32 apart, in a byte
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    codes = _nibbles(blocks[:, :, :128], 64) | high.reshape(blocks.shape[0], -1) << 4
    low, rest = pack(codes, 6)
    scale = _bytes(blocks, 192, 208).view(torch.int8)
    return CodedWeight(6, 16, low, scale, rest, zero=32, factor=_factors(blocks, 208, 1))


def _bytes(blocks: _Blocks, first: int, end: int) -> torch.Tensor:
    """A copy of some bytes of every block. [rows, blocks * bytes]"""
    return blocks[:, :, first:end].contiguous().view(blocks.shape[0], -1)


def _halves(blocks: _Blocks, first: int) -> torch.Tensor:
    """The float16 at a byte of every block. [rows, blocks]"""
    return _bytes(blocks, first, first + 2).view(torch.float16)


def _factors(blocks: _Blocks, first: int, count: int) -> torch.Tensor:
    """Neighbouring float16 of every block. [rows, blocks, count]"""
    return blocks[:, :, first : first + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor, stride: int) -> torch.Tensor:
    """Codes of 4 bits: of `stride` bytes first the low bits, then the high ones. [rows, columns]"""
    runs = packed.reshape(*packed.shape[:2], -1, 1, stride)
    shifts = torch.tensor([[0], [4]], dtype=torch.uint8)
    return (runs >> shifts & 15).reshape(packed.shape[0], -1)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of 6 bits in 12 bytes. Two of [rows, blocks * 8]"""
    first, second, third = packed.reshape(*packed.shape[:2], 3, 4).unbind(2)
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    offset = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    return scale.flatten(1), offset.flatten(1)


_READERS: dict[int, tuple[int, int, Callable[[_Blocks], CodedWeight]]] = {
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    6: (32, 22, _q5_0),
    7: (32, 24, _q5_1),
    8: (32, 34, _q8_0),
    12: (256, 144, _q4_k),
    13: (256, 176, _q5_k),
    14: (256, 210, _q6_k),
}
"""By ggml type: columns and bytes of a block, and its reader."""
