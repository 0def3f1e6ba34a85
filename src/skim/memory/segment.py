"""One checkpoint file: the keys and values of up to a few hundred slots, as safetensors with a JSON header.

A prefix is a chain of segments. A segment's *link* is a hash of the model, the namespace and all tokens and
positions up to its end, so a file is found by its contents, and equal prefixes are stored once. The header
says what the file holds, and a digest covers header and data: a file that is torn, foreign, altered, older or
newer than this code is refused with the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from skim.memory.prefix import OFFSET_SHIFT, Namespace
from skim.memory.store import LayerStore, PlainStore, Plane

VERSION = 2  # 1: one scale per head of bytes
TOKENS = 256  # slots of a segment, rounded up to whole blocks
SUFFIX = ".safetensors"
_LONGEST_HEADER = 16 * 2**20
_LINK = 32  # hex digits
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Reason = Literal["torn", "foreign", "tampered", "outdated", "future", "missing"]


class RefusedFile(Exception):
    """A checkpoint file that cannot be used. The message names it and says why."""

    def __init__(self, path: Path, reason: Reason, why: str) -> None:
        super().__init__(f"checkpoint file {path} is {reason}: {why}")
        self.reason: Reason = reason


@dataclass(frozen=True)
class Field:
    """One plane of one layer, as it stands in a file: `shape` elements for each slot."""

    name: str  # layer and plane: `3.key`
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Format = tuple[Field, ...]
"""The fields of a file, in the order of its data: large elements first, so that all are aligned."""


def format_of(stores: Sequence[LayerStore], dtype: torch.dtype) -> Format:
    """The format in which these stores are saved: their planes as they are, without derived ones.

    A store with planes per block is saved as plain keys and values, since a segment may end inside a block.
    """
    fields = [
        Field(f"{layer}.{plane.name}", plane.dtype, plane.shape)
        for layer, store in enumerate(stores)
        for plane in saved_planes(store, dtype)
    ]
    return tuple(sorted(fields, key=lambda field: -field.dtype.itemsize))


def saved_planes(store: LayerStore, dtype: torch.dtype) -> tuple[Plane, ...]:
    kept = tuple(plane for plane in store.planes if not plane.derived)
    return PlainStore(store.shape, dtype).planes if any(plane.per_block for plane in kept) else kept


def data_bytes(form: Format, tokens: int) -> int:
    return tokens * sum(field.slot_bytes for field in form)


def views(form: Format, data: torch.Tensor, tokens: int) -> dict[str, torch.Tensor]:
    """The fields in a flat tensor of bytes, by name. [tokens, *shape]"""
    found, at = {}, 0
    for field in form:
        end = at + tokens * field.slot_bytes
        found[field.name] = data[at:end].view(field.dtype).view(tokens, *field.shape)
        at = end
    return found


@dataclass(frozen=True)
class Identity:
    """The model that computed a checkpoint, and the number of slots in its segments."""

    model: str
    fingerprint: str
    segment: int = TOKENS

    def root(self, namespace: Namespace) -> str:
        """The link before the first segment."""
        parts = [VERSION, self.fingerprint, self.segment, hide(namespace.salt), namespace.policy]
        return _hash(json.dumps(parts).encode())


def hide(salt: str) -> str:
    """A cache salt as files show it: a hash, because a salt may be a secret."""
    return hashlib.sha256(salt.encode()).hexdigest()


def next_link(link: str, keys: Sequence[int]) -> str:
    """The link after a segment with these prefix-tree keys, which follows `link`."""
    return _hash(link.encode() + array("q", keys).tobytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LINK]


@dataclass(frozen=True)
class Segment:
    """The contents of a file, without its keys and values."""

    parent: str  # link of the prefix before it
    link: str
    first: int  # its first slot in the sequence
    keys: array[int]  # prefix-tree keys of its slots
    salt: str  # hidden
    policy: str
    form: Format
    kind: str  # the KV format by name

    @property
    def tokens(self) -> int:
        return len(self.keys)

    @property
    def end(self) -> int:
        return self.first + len(self.keys)

    @property
    def file_name(self) -> str:
        return f"{self.parent}-{self.link}-{self.tokens}{SUFFIX}"

    @property
    def data_bytes(self) -> int:
        return data_bytes(self.form, self.tokens)


def encode(segment: Segment, identity: Identity, data: torch.Tensor) -> list[bytes | memoryview]:
    """The parts of a file, in order. `data` is a flat tensor of bytes on the host."""
    keys = np.frombuffer(segment.keys, dtype=np.int64)
    tokens = (keys & (2**OFFSET_SHIFT - 1)).astype("<i8")
    positions = (np.arange(segment.first, segment.end) + (keys >> OFFSET_SHIFT)).astype("<i8")
    slots = tokens.tobytes() + positions.tobytes()
    raw = _memory(data)
    about: dict[str, Any] = {
        "version": VERSION,
        "model": identity.model,
        "fingerprint": identity.fingerprint,
        "segment": identity.segment,
        "salt": segment.salt,
        "policy": segment.policy,
        "format": segment.kind,
        "parent": segment.parent,
        "link": segment.link,
        "first": segment.first,
        "tokens": segment.tokens,
    }
    about["digest"] = _digest(about, slots, raw)
    header = {"__metadata__": {"skim": json.dumps(about)}, **_table(segment.form, segment.tokens)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text + slots, raw]


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _table(form: Format, tokens: int) -> dict[str, Any]:
    """The tensors of a file as safetensors lists them."""
    table: dict[str, Any] = {}
    at = 0
    slots = [Field("tokens", torch.int64, ()), Field("positions", torch.int64, ())]
    for field in (*slots, *form):
        end = at + tokens * field.slot_bytes
        shape = [tokens, *field.shape]
        table[field.name] = {"dtype": _NAMES[field.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    return table


def _digest(about: dict[str, Any], slots: bytes, raw: memoryview) -> str:
    plain = {name: value for name, value in about.items() if name != "digest"}
    found = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    found.update(slots)
    found.update(raw)
    return found.hexdigest()


@dataclass(frozen=True)
class Head:
    """A file's header after all checks that need no data."""

    segment: Segment
    about: dict[str, Any]
    slots: bytes  # tokens and positions, as stored


def read_head(file: BinaryIO, path: Path, identity: Identity) -> Head:
    """Read and check everything before the keys and values. Raises `RefusedFile`."""
    size = path.stat().st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise RefusedFile(path, "torn", f"its header should have {length} bytes, the file has {size}")
    try:
        table = json.loads(file.read(length))
        about = json.loads(table.pop("__metadata__")["skim"])
        version, tokens = int(about["version"]), int(about["tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedFile(path, "foreign", f"its header is not Skim's ({type(error).__name__})") from None
    if version > VERSION:
        raise RefusedFile(
            path, "future", f"it has version {version}, and this Skim reads up to {VERSION}; update Skim"
        )
    if version < VERSION:
        raise RefusedFile(
            path,
            "outdated",
            f"it has version {version}, and this Skim reads {VERSION}, whose codes differ; remove it and "
            "save the prefix again",
        )
    if (about.get("fingerprint"), about.get("segment")) != (identity.fingerprint, identity.segment):
        raise RefusedFile(
            path,
            "foreign",
            f"the model {about.get('model')!r} computed it, and this one is {identity.model!r}",
        )
    try:
        form = _format_in(table)
        if table != _table(form, tokens):
            raise ValueError("its table of tensors has gaps, overlaps or unknown entries")
        expected = 8 + length + 16 * tokens + data_bytes(form, tokens)
        if size != expected:
            raise RefusedFile(path, "torn", f"it has {size} of {expected} bytes")
        slots = file.read(16 * tokens)
        segment = _segment(about, form, slots)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RefusedFile(path, "tampered", f"{error}") from None
    if path.name != segment.file_name:
        raise RefusedFile(path, "tampered", f"its contents belong to {segment.file_name}")
    return Head(segment, about, slots)


def _format_in(table: dict[str, Any]) -> Format:
    fields = [
        Field(name, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"][1:])))
        for name, entry in table.items()
        if name not in ("tokens", "positions")
    ]
    if any(size < 1 for field in fields for size in field.shape):
        raise ValueError("a tensor has no elements")
    return tuple(fields)


def _segment(about: dict[str, Any], form: Format, slots: bytes) -> Segment:
    tokens, first = int(about["tokens"]), int(about["first"])
    if not 0 < tokens <= int(about["segment"]) or first < 0 or first % int(about["segment"]):
        raise ValueError(f"it has {tokens} slots from slot {first}")
    ids, positions = np.frombuffer(slots, dtype="<i8").reshape(2, tokens)
    keys = array("q", (ids + ((positions - np.arange(first, first + tokens)) << OFFSET_SHIFT)).tobytes())
    link = next_link(str(about["parent"]), keys)
    if link != about["link"]:
        raise ValueError("its tokens are not those of its link")
    salt, policy, kind = (str(about[name]) for name in ("salt", "policy", "format"))
    return Segment(str(about["parent"]), link, first, keys, salt, policy, form, kind)


def read(
    path: Path, identity: Identity, allocate: Callable[[int], torch.Tensor]
) -> tuple[Segment, torch.Tensor]:
    """Read a whole file. `allocate` makes a flat tensor of bytes on the host for its keys and values."""
    try:
        with open(path, "rb") as file:
            head = read_head(file, path, identity)
            data = allocate(head.segment.data_bytes)
            raw = _memory(data)
            at = 0
            while at < len(raw):
                count = file.readinto(raw[at:])
                if not count:
                    raise RefusedFile(path, "torn", f"its data ends after {at} of {len(raw)} bytes")
                at += count
    except FileNotFoundError:
        raise RefusedFile(path, "missing", "it was removed to make room") from None
    if _digest(head.about, head.slots, raw) != head.about.get("digest"):
        raise RefusedFile(path, "tampered", "its digest does not fit its contents")
    return head.segment, data
