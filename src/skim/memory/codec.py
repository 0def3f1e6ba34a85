"""Quantized storage: a layer whose keys and values are stored as codes and scales.

A codec turns vectors into codes, each token and head separately, so a token is written once and never again.
A `CodedStore` is a codec for keys and one for values; `formats.py` names the pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from skim.memory.basis import Basis, hadamard, paired_hadamard
from skim.memory.store import LayerShape, LayerStore, Plane, Planes

SCALES = torch.bfloat16
"""Of scales: the range of float32, so that no scale overflows. Codes are chosen for the rounded scale."""


class Codec(ABC):
    """Codes of one vector per token and KV head."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        self.kv_heads = kv_heads
        self.dim = dim

    def rotation(self) -> torch.Tensor:
        """The basis in which vectors are encoded. [dim, dim], its columns are orthonormal"""
        return hadamard(self.dim)

    @abstractmethod
    def planes(self) -> tuple[Plane, Plane]:
        """Codes and scales of one slot, without names."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of [tokens, kv_heads, dim] float32. NaN and infinity are restored as NaN."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, kv_heads, dim]"""


class ByteCodec(Codec):
    """One byte a value, and two scales a head: one of the even values, one of the odd ones.

    The basis keeps the members of rotary pairs apart, so that each member has its own scale.
    """

    kind: torch.dtype  # of codes
    most: float  # the largest code

    def rotation(self) -> torch.Tensor:
        return paired_hadamard(self.dim)

    def planes(self) -> tuple[Plane, Plane]:
        return Plane("", (self.kv_heads, self.dim), self.kind), Plane("", (self.kv_heads, 2), SCALES)

    def scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors by their scales, within -most : most, and the scales. [..., dim], [..., 2]"""
        pairs = x.reshape(*x.shape[:2], -1, 2)
        scales = (pairs.abs().amax(dim=2) / self.most).to(SCALES)
        return scaled(pairs, scales[:, :, None]).flatten(2).clamp(-self.most, self.most), scales

    def restore(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Codes, as numbers of any type, times their scales, rounded once."""
        pairs = codes.float().view(*codes.shape[:2], -1, 2)
        return (pairs * scales.float()[:, :, None]).flatten(2).to(dtype)


class CodedStore(LayerStore):
    """Keys and values as codes and scales, in a rotated basis."""

    KEYS = ("key_codes", "key_scales")
    VALUES = ("value_codes", "value_scales")
    exact = False

    def __init__(self, shape: LayerShape, dtype: torch.dtype, key: type[Codec], value: type[Codec]) -> None:
        self.shape = shape
        self.dtype = dtype  # of restored keys and values
        self.key = key(shape.kv_heads, shape.key_dim)
        self.value = value(shape.kv_heads, shape.value_dim)
        self.planes = tuple(
            Plane(name, plane.shape, plane.dtype)
            for names, codec in ((self.KEYS, self.key), (self.VALUES, self.value))
            for name, plane in zip(names, codec.planes(), strict=True)
        )
        self._bases: dict[torch.device, tuple[Basis, Basis]] = {}

    def bases(self, device: torch.device) -> tuple[Basis, Basis]:
        """The bases of keys and of values."""
        if device not in self._bases:
            key, value = (
                Basis.rotation(self.shape.kv_heads, codec.rotation()) for codec in (self.key, self.value)
            )
            self._bases[device] = (key.to(device), value.to(device))
        return self._bases[device]

    def write(self, planes: Planes, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        bases = self.bases(key.device)
        for names, codec, basis, new in (
            (self.KEYS, self.key, bases[0], key),
            (self.VALUES, self.value, bases[1], value),
        ):
            for name, part in zip(names, codec.encode(basis.store(new)), strict=True):
                planes.slots[name].index_copy_(0, slots, part)

    def gather(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._decode(planes, at, torch.float32)
        bases = self.bases(key.device)
        return bases[0].restore(key).to(self.dtype), bases[1].restore(value).to(self.dtype)

    def read(self, planes: Planes, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decode(planes, at, self.dtype)

    def turn_query(self, query: torch.Tensor) -> torch.Tensor:
        return self.bases(query.device)[0].turn_query(query)

    def turn_out(self, out: torch.Tensor) -> torch.Tensor:
        return self.bases(out.device)[1].turn_out(out)

    def _decode(
        self, planes: Planes, at: slice | torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales, value_codes, value_scales = (planes.slots[n][at] for n in (*self.KEYS, *self.VALUES))
        return self.key.decode(codes, scales, dtype), self.value.decode(value_codes, value_scales, dtype)


def scaled(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x by its scales; zeros where the scale is 0."""
    wide = scales.float()
    return torch.where(wide == 0, 0.0, x / wide)
