"""The safetensors files of a model directory, opened for reading.

Tensors are mapped from the files, not read into memory. The files' headers are checked when they are opened:
every tensor lies inside its file. A damaged file raises a ModelError that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from skim.errors import ModelError, first_line, shown
from skim.models.remedy import remedy

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Shards:
    """All tensors of a directory, by name."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        wanted = self._indexed()
        for file in sorted(set(wanted.values())) if wanted else self._found():
            opened = self._open(file)
            self._files[file] = opened
            for tensor in opened.keys():  # noqa: SIM118
                if wanted and wanted.get(tensor) != file:
                    continue
                if tensor in self._where:
                    raise self.broken(file, f"it repeats the tensor {tensor} of {self._where[tensor]}")
                self._where[tensor] = file
        if lost := sorted(set(wanted) - set(self._where)):
            raise self.broken(wanted[lost[0]], f"it lacks the tensor {lost[0]}, which {INDEX} names")

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._where

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._slice(tensor).get_shape())

    def dtype(self, tensor: str) -> str:
        """The type's name in safetensors, such as F16 or I32."""
        return str(self._slice(tensor).get_dtype())

    def tensor(self, tensor: str) -> torch.Tensor:
        """The tensor. It may share memory with its file."""
        file = self._where[tensor]
        try:
            value: torch.Tensor = self._files[file].get_tensor(tensor)
        except Exception as error:  # a type that torch does not have, or a file that has changed
            raise self.wrong(tensor, first_line(error)) from error
        return value

    def wrong(self, tensor: str, why: str) -> ModelError:
        """The error for a tensor that cannot be used."""
        file = self._where.get(tensor, "config.json")
        return ModelError(f"{self.name}: the tensor {tensor} in {file}: {why}; {remedy(self.path)}")

    def broken(self, file: str, why: str) -> ModelError:
        """The error for a file that cannot be used."""
        return ModelError(f"{self.name}: {self.path / file}: {why}; {remedy(self.path)}")

    def _slice(self, tensor: str) -> Any:
        return self._files[self._where[tensor]].get_slice(tensor)

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        try:
            return safe_open(self.path / file, "pt")
        except Exception as error:  # its own errors, and those of the operating system
            raise self.broken(
                file, f"it is no complete safetensors file ({first_line(error)[:160]})"
            ) from error

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


def read_json(shards: Shards, file: str) -> dict[str, Any]:
    """A JSON object of the directory."""
    try:
        found = json.loads((shards.path / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise shards.broken(file, f"it cannot be read ({first_line(error)[:160]})") from error
    if not isinstance(found, dict):
        raise shards.broken(file, f"it holds {shown(found)}, not an object")
    return found
