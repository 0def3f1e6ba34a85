"""Codes that other formats pack into 32-bit words, and the weight they make."""

from __future__ import annotations

from dataclasses import replace

import torch

from skim.models.quantized.format import GROUPS, RUN, CodedWeight, pack


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, the lowest bits of a word first. int32 [..., n] -> uint8 [..., n * 32 / bits]"""
    found = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `unpack_words`. The last word is filled up with zeros."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (32 // bits)))
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.reshape(-1).view(torch.int32).view(*codes.shape[:-1], -1)


def fit_group(columns: int, given: int) -> int | None:
    """The largest group that divides the columns and the given group, or None."""
    if columns % RUN:
        return None
    return next((group for group in reversed(GROUPS) if not columns % group and not given % group), None)


def spread(values: torch.Tensor, given: int, group: int, columns: int) -> torch.Tensor:
    """Repeat values of groups of `given` columns for smaller groups. [rows, n] -> [rows, columns / group]"""
    if given == group:
        return values.contiguous()
    return values[:, torch.arange(0, columns, group) // given].contiguous()


def assemble(
    codes: torch.Tensor,
    bits: int,
    scale: torch.Tensor,
    zeros: torch.Tensor | int,
    given: int,
    group: int,
    order: torch.Tensor | None = None,
) -> CodedWeight:
    """A weight of codes, and of scales and zero points for groups of `given` columns.

    codes: uint8 [rows, columns], in the order of the groups; zeros: uint8 [rows, n]
    """
    columns = codes.shape[1]
    low, high = (codes.contiguous(), None) if bits == 8 else pack(codes.contiguous(), bits)
    scale = spread(scale, given, group, columns)
    if isinstance(zeros, torch.Tensor):
        zeros = spread(zeros, given, group, columns)
    return with_zeros(CodedWeight(bits, group, low, scale, high, order=order), zeros)


def with_zeros(weight: CodedWeight, zeros: torch.Tensor | int) -> CodedWeight:
    """The weight with these zero points; equal ones become one. zeros: uint8 [rows, groups]"""
    if isinstance(zeros, int):
        return replace(weight, zero=zeros)
    first = int(zeros[0, 0])
    return replace(weight, zero=first) if bool((zeros == first).all()) else replace(weight, offset=zeros)


def sort_groups(index: torch.Tensor, groups: int) -> torch.Tensor | str | None:
    """The order of columns that puts those of a group side by side, None if they are, or why there is none.

    index: the group of every column
    """
    index = index.long()
    if int(index.min()) < 0 or int(index.max()) >= groups:
        return f"groups from {int(index.min())} to {int(index.max())}, not from 0 to {groups - 1}"
    sizes = index.bincount(minlength=groups)
    if int(sizes.min()) != int(sizes.max()):
        return f"groups of {int(sizes.min())} to {int(sizes.max())} columns, not of {len(index) // groups}"
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(index))) else order
