"""Write safetensors files tensor by tensor: only what is being made is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_SHARD_BYTES = 2 * 10**9
_ALIGNMENT = 64  # bytes; where tensors begin in a file
NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Promise:
    """Type and shape of a tensor that is to be made."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Tensors that are made together, such as the planes of a weight."""

    promised: Mapping[str, Promise]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.promised.values())


def write_shards(directory: Path, pieces: Sequence[Piece], advance: Callable[[int], object]) -> None:
    """Write one safetensors file, or several with an index."""
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + piece.nbytes > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(piece)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        where = {
            tensor: name
            for name, shard in zip(names, shards, strict=True)
            for piece in shard
            for tensor in piece.promised
        }
        index = {"metadata": {"total_size": sum(piece.nbytes for piece in pieces)}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        _write(directory / name, shard, advance)


def _write(path: Path, shard: Sequence[Piece], advance: Callable[[int], object]) -> None:
    """Tensors with larger numbers come first, so that each is aligned to its numbers."""
    promised = {name: one for piece in shard for name, one in piece.promised.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, one in sorted(promised.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name] = at
        at += one.nbytes
        header[name] = {
            "dtype": NAMES[one.dtype],
            "shape": one.shape,
            "data_offsets": [starts[name], at],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for piece in shard:
            made = piece.make()
            assert {name: Promise(one.dtype, tuple(one.shape)) for name, one in made.items()} == dict(
                piece.promised
            ), list(piece.promised)
            for name, value in made.items():
                out.seek(8 + len(text) + starts[name])
                out.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            advance(piece.nbytes)
