"""The safetensors files of a model directory.

A tensor is read into memory of its own when it is asked for. Files are neither mapped nor kept open, so their
pages do not count as memory of the process. Every length and offset is checked against the file before use. A
damaged file raises a ModelError that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skim.errors import ModelError, first_line, shown
from skim.models.quantized.stream import NAMES
from skim.models.remedy import remedy
from skim.models.scratch import memory_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 10**6
MAX_DIMS = 8
_TYPES = {name: dtype for dtype, name in NAMES.items()} | {
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class _Place:
    """Where a tensor is, and what it is."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Shards:
    """All tensors of a directory, by name."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._places: dict[str, _Place] = {}
        wanted = self._indexed()
        for file in sorted(set(wanted.values())) if wanted else self._found():
            for tensor, place in self._read_header(file):
                if wanted and wanted.get(tensor) != file:
                    continue
                if tensor in self._places:
                    raise self.broken(file, f"it repeats the tensor {tensor} of {self._places[tensor].file}")
                self._places[tensor] = place
        if lost := sorted(set(wanted) - set(self._places)):
            raise self.broken(wanted[lost[0]], f"it lacks the tensor {lost[0]}, which {INDEX} names")

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._places

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._places[tensor].shape

    def dtype(self, tensor: str) -> str:
        """The type's name in safetensors, such as F16 or I32."""
        return self._places[tensor].dtype

    def torch_dtype(self, tensor: str) -> torch.dtype:
        name = self.dtype(tensor)
        if name not in _TYPES:
            raise self.wrong(tensor, f"its type is {shown(name)}, which Skim does not read")
        return _TYPES[name]

    def floats(self) -> set[torch.dtype]:
        """The types of floats in the files. Types that torch does not know are left out."""
        types = {_TYPES.get(place.dtype) for place in self._places.values()}
        return {dtype for dtype in types if dtype is not None and dtype.is_floating_point}

    def tensor(self, tensor: str) -> torch.Tensor:
        """A copy of the tensor."""
        place, dtype = self._places[tensor], self.torch_dtype(tensor)
        value = torch.empty(place.nbytes, dtype=torch.uint8)
        buffer, done = memory_of(value), 0
        try:
            with (self.path / place.file).open("rb", buffering=0) as file:
                file.seek(place.start)
                while done < place.nbytes and (count := file.readinto(buffer[done:])):
                    done += count
        except OSError as error:
            raise self.broken(place.file, f"it cannot be read ({error.strerror or error})") from error
        if done < place.nbytes:
            raise self.wrong(tensor, "the file has become shorter")
        return value.view(dtype).view(place.shape)

    def wrong(self, tensor: str, why: str) -> ModelError:
        """The error for a tensor that cannot be used."""
        file = self._places[tensor].file if tensor in self._places else "config.json"
        return ModelError(f"{self.name}: the tensor {tensor} in {file}: {why}; {remedy(self.path)}")

    def broken(self, file: str, why: str) -> ModelError:
        """The error for a file that cannot be used."""
        return ModelError(f"{self.name}: {self.path / file}: {why}; {remedy(self.path)}")

    def _read_header(self, file: str) -> Iterator[tuple[str, _Place]]:
        """The tensors of a file, all of which lie inside it."""
        try:
            size = (self.path / file).stat().st_size
            with (self.path / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                    raise self.broken(file, f"it is no complete safetensors file of {size} bytes")
                header = json.loads(opened.read(length))
        except (OSError, ValueError, RecursionError) as error:
            raise self.broken(file, f"its header cannot be read ({first_line(error)[:160]})") from error
        if not isinstance(header, dict):
            raise self.broken(file, f"its header is {shown(header)}")
        for tensor, entry in header.items():
            if tensor == "__metadata__":
                continue
            place = _place(file, entry, 8 + length, size)
            if place is None:
                raise self.broken(
                    file, f"it is no complete safetensors file: {shown(tensor)} is {shown(entry)}"
                )
            yield tensor, place

    def _found(self) -> list[str]:
        """Files without an index: the usual one, or all of them."""
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        return sorted(file.name for file in self.path.glob("*.safetensors"))

    def _indexed(self) -> dict[str, str]:
        """The file of every tensor by the index; empty if there is no index or it does not count."""
        if (self.path / SINGLE).is_file() or not (self.path / INDEX).is_file():
            return {}
        found = read_json(self, INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise self.broken(INDEX, f"its weight_map is {shown(found)}")
        for tensor, file in found.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise self.broken(
                    INDEX, f"it places the tensor {tensor} in {shown(file)}, which is no file name"
                )
        return found


def _place(file: str, entry: object, base: int, size: int) -> _Place | None:
    """A tensor by its entry in the header; None if it does not lie between `base` and the end of the file."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            sound = len(shape) <= MAX_DIMS and all(isinstance(one, int) and one >= 0 for one in shape)
            if not sound or not 0 <= start <= end <= size - base:
                return None
            if dtype in _TYPES and end - start != math.prod(shape) * _TYPES[dtype].itemsize:
                return None
            return _Place(file, dtype, tuple(shape), base + start, end - start)
    return None


def read_json(shards: Shards, file: str) -> dict[str, Any]:
    """A JSON object of the directory."""
    try:
        found = json.loads((shards.path / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise shards.broken(file, f"it cannot be read ({first_line(error)[:160]})") from error
    if not isinstance(found, dict):
        raise shards.broken(file, f"it holds {shown(found)}, not an object")
    return found
