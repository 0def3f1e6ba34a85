"""Read a GGUF file: its metadata, and its tensors as float32 or as codes.

Knows the container and the number formats, and nothing about architectures or tokenizers. Every length and
offset is checked against the file before use. A truncated, damaged or hostile file raises a ModelError that
names it, and never causes a crash or an allocation of a size that the file chose.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from skim.errors import ModelError

if TYPE_CHECKING:
    import torch

    from skim.models.quantized.format import CodedWeight

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY = 12  # bytes: the length of a name (8) and a type (4)
_MAX_DIMS = 4


@dataclass(frozen=True)
class Tensor:
    """Location and format of one tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, the slowest dimension first."""
    kind: int
    """The ggml type number."""
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """An open GGUF file: `metadata` by key and `tensors` by name. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                if magic != _MAGIC:
                    found = f"starts with {magic!r}" if magic else "is empty"
                    raise ModelError(f"{path} is not a GGUF file (it {found}); give a .gguf file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(
                f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
            ) from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or truncated: {why}; download it again")

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor's values as a new float32 torch tensor."""
        from skim.models.gguf.coded import covers

        entry = self.tensors[name]
        decode = _DECODERS.get(entry.kind)
        if decode is not None:
            return decode(self._bytes(entry, 0, entry.nbytes)).reshape(entry.shape)
        if covers(entry.kind):
            return self.coded(name).restore().reshape(entry.shape)
        return self._decode_any(self._bytes(entry, 0, entry.nbytes), entry)

    def coded(self, name: str) -> CodedWeight:
        """Return a tensor of a type that `coded.covers` as a matrix of codes."""
        from skim.models.gguf.coded import coded
        from skim.models.quantized.checks import why_unusable

        entry = self.tensors[name]
        shape = math.prod(entry.shape[:-1]), entry.shape[-1]
        weight = coded(lambda first, end: self._bytes(entry, first, end), entry.kind, shape)
        if why := why_unusable(weight):
            raise self.broken(f"tensor {name!r} has {why}")
        return weight

    def _bytes(self, entry: Tensor, first: int, end: int) -> torch.Tensor:
        """Some of the tensor's bytes. uint8 [bytes]

        They are read, not mapped: mapped pages of a large file would count as memory of the process.
        """
        import torch

        raw = bytearray(end - first)
        with self.path.open("rb") as file:
            file.seek(entry.start + first)
            if file.readinto(raw) != len(raw):
                raise self.broken(f"tensor {entry.name!r} ends before byte {entry.start + end}")
        return torch.frombuffer(raw, dtype=torch.uint8)

    def _decode_any(self, data: torch.Tensor, entry: Tensor) -> torch.Tensor:
        """Decode with the gguf package, which is slower and knows every format."""
        import torch
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType(entry.kind)
        rows = data.numpy().reshape(math.prod(entry.shape[:-1]), -1)
        try:
            values = quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {entry.name!r} has the format {kind.name}, which cannot be decoded; "
                "use a file in another quantization, such as Q4_K_M or Q8_0"
            ) from error
        return torch.from_numpy(values).to(torch.float32).reshape(entry.shape)

    def _read_header(self) -> None:
        cursor = _Cursor(self)
        cursor.skip(4)
        version = cursor.number("I")
        if version not in _VERSIONS:
            swapped = version != 0 and version & 0xFFFF == 0
            hint = "a big-endian file" if swapped else f"GGUF version {version}"
            raise ModelError(
                f"{self.path} is {hint}; Skim reads little-endian GGUF versions 2 and 3: convert it again"
            )
        n_tensors, n_pairs = cursor.number("Q"), cursor.number("Q")
        for what, count in (("tensors", n_tensors), ("metadata entries", n_pairs)):
            if count > cursor.left // _SMALLEST_ENTRY:
                raise self.broken(f"it claims {count} {what}")
        for _ in range(n_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        entries = [self._read_entry(cursor) for _ in range(n_tensors)]

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise self.broken(f"general.alignment is {alignment!r}")
        base = math.ceil(cursor.at / alignment) * alignment
        for name, shape, kind, offset in entries:
            nbytes = self._bytes_of(name, shape, kind)
            if name in self.tensors:
                raise self.broken(f"tensor {name!r} is listed twice")
            if base + offset + nbytes > len(self._map):
                raise self.broken(
                    f"tensor {name!r} ends at byte {base + offset + nbytes} of {len(self._map)}"
                )
            self.tensors[name] = Tensor(name, shape, kind, base + offset, nbytes)

    def _read_entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dims = cursor.number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.broken(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
        return name, shape, cursor.number("I"), cursor.number("Q")

    def _bytes_of(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unknown format number {kind}; "
                "upgrade the gguf package or use a file in another quantization"
            ) from None
        if min(shape) < 1 or shape[-1] % block:
            raise self.broken(
                f"tensor {name!r} has the shape {list(shape)}, with quantization blocks of {block}"
            )
        return math.prod(shape) // int(block) * int(size)


class _Cursor:
    """A read position in the header, checked against the end of the file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._map = file._map
        self._end = len(file._map)
        self.at = 0

    @property
    def left(self) -> int:
        return self._end - self.at

    def skip(self, count: int) -> int:
        """Advance by `count` bytes and return the position before them."""
        start = self.at
        if count > self._end - start:
            raise self._file.broken(f"the header needs {count} bytes at byte {start} of {self._end}")
        self.at = start + count
        return start

    def number(self, code: str) -> int:
        return int(self._numbers(code, 1)[0])

    def string(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        try:
            return self._map[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._file.broken(f"the text at byte {start} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._numbers(self._code(kind), 1)[0]

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if depth > 3 or count > self.left:
            raise self._file.broken(f"it claims an array of {count} values at byte {self.at}")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return list(self._numbers(self._code(kind), count))

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack_from(layout, self._map, self.skip(struct.calcsize(layout)))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._file.broken(f"it has a value of the unknown type {kind} at byte {self.at}")
        return _SCALARS[kind]


def _f32(data: torch.Tensor) -> torch.Tensor:
    import torch

    return data.view(torch.float32)


def _f16(data: torch.Tensor) -> torch.Tensor:
    import torch

    return data.view(torch.float16).to(torch.float32)


def _bf16(data: torch.Tensor) -> torch.Tensor:
    import torch

    return data.view(torch.bfloat16).to(torch.float32)


_DECODERS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: _f32,
    1: _f16,
    30: _bf16,
}
