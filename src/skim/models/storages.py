"""Storages: the memory of a model's weights, freed and filled under its tensors.

Layers hold aliases of weights: tied tables, packed products, views, detached tensors in lean forwards. All
aliases share a storage, so its memory can be freed and brought back without touching any of them (as FSDP
does). Weights never change, so a copy that was made once stays valid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from skim.models.scratch import HostCopy, ScratchFile


class Storages:
    """The distinct storages of some modules, on one device. `free` needs a copy on the host or in a file.

    Not thread-safe. No module may run while its storages are freed.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = tuple(storages)
        self._sizes = tuple(one.nbytes() for one in storages)
        self.device = storages[0].device if storages else torch.device("cpu")
        self.bytes = sum(self._sizes)
        self.resident = True
        self._host: HostCopy | None = None
        self._file: ScratchFile | None = None
        self._starts: list[int] = []  # in the file
        self._filled: torch.cuda.Event | None = None  # of a copy on a side stream

    @classmethod
    def of(cls, *modules: Any, without: Iterable[Storages] = ()) -> Storages:
        """Storages of all parameters and buffers, each once, in the modules' order, but those `without`.

        Storages that cannot be resized are replaced by owned copies (see `own`). A tensor that is not on the
        device of the first is left out: small constants that a family keeps on the host.
        """
        own(*modules)
        known = {storage._cdata for one in without for storage in one._storages}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in _tensors(modules):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.nbytes():
                found.setdefault(storage._cdata, storage)
        device = next(iter(found.values())).device if found else None
        return cls([one for one in found.values() if one.device == device])

    @property
    def addresses(self) -> tuple[int, ...]:
        """A captured CUDA graph is valid only while they are unchanged."""
        return tuple(one.data_ptr() for one in self._storages)

    @property
    def identities(self) -> frozenset[int]:
        """They name the same storages as long as tensors use them, freed or not."""
        return frozenset(one._cdata for one in self._storages)

    @property
    def host_bytes(self) -> int:
        host = self._host  # another thread may drop it meanwhile
        return 0 if host is None else host.bytes

    @property
    def disk_bytes(self) -> int:
        return 0 if self._file is None else self.bytes

    def keep_host_copy(self) -> None:
        """Copy the bytes to host memory, pinned if the device is CUDA. Does nothing if there is a copy."""
        if self._host is not None:
            return
        copy = HostCopy(self._sizes, pinned=self.device.type == "cuda")
        if self.resident:
            for part, storage in zip(copy.parts, self._storages, strict=True):
                part.copy_(_bytes_of(storage), non_blocking=copy.pinned)
            self._synchronize()
        else:
            for index, part in enumerate(copy.parts):
                self._read(index, part)
        self._host = copy

    def keep_file_copy(self, file: ScratchFile) -> None:
        """Append the bytes to a scratch file. Does nothing if they are in one."""
        if self._file is not None:
            return
        if self.resident:
            self._synchronize()
            parts = [_bytes_of(storage) for storage in self._storages]
        else:
            assert self._host is not None
            parts = self._host.parts
        self._starts = file.append(parts)
        self._file = file

    def drop_host_copy(self) -> None:
        """Free the copy in host memory, if the bytes are elsewhere too."""
        if self._host is not None and (self.resident or self._file is not None):
            self._synchronize()  # a copy from it may be under way
            self._host = None

    def drop_file_copy(self) -> None:
        """Forget the copy in the file, if the bytes are elsewhere too."""
        if self.resident or self._host is not None:
            self._file = None

    def check(self) -> None:
        """Raise if `free` would."""
        if self._host is None and self._file is None:
            raise AssertionError("weights without a copy would be lost")
        if self.resident and not all(one.resizable() for one in self._storages):
            raise AssertionError("memory that numpy has seen since cannot be freed")

    def free(self) -> None:
        """Free the device's memory. Its tensors must not be read until `fill`."""
        self.check()
        if self._filled is not None:  # memory may be reused before the copy into it has ended
            wait_for(self._filled, self.device)
            self._filled = None
        for storage in self._storages:
            storage.resize_(0)
        self.resident = False

    def fill(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
        """Allocate the device's memory and copy the bytes back. If that fails, nothing stays allocated.

        Memory is allocated in the order of the current stream. With a side `stream` the copy runs there, and
        the event to wait for before the tensors are read is returned. From a file, all is done on return.
        """
        if self.resident:
            return self._filled
        filled: torch.cuda.Event | None = None
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
            if stream is None:
                self._copy_back()
            else:
                stream.wait_stream(torch.cuda.current_stream(self.device))  # its memory may be in use there
                with torch.cuda.stream(stream):
                    self._copy_back()
                    filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    filled.record(stream)
        except BaseException:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            for storage in self._storages:
                storage.resize_(0)
            raise
        self.resident, self._filled = True, filled
        return filled

    def _copy_back(self) -> None:
        for index, storage in enumerate(self._storages):
            self._read(index, _bytes_of(storage))

    def _read(self, index: int, into: torch.Tensor) -> None:
        if self._host is not None:
            into.copy_(self._host.parts[index], non_blocking=self._host.pinned)
        else:
            assert self._file is not None
            self._file.read(self._starts[index], into)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def wait_for(event: torch.cuda.Event, device: torch.device) -> None:
    """Have the current stream of this device wait. By itself, an event takes that of the current device."""
    event.wait(torch.cuda.current_stream(device))


def own(*modules: Any) -> None:
    """Give modules memory of their own where theirs cannot be resized: mapped files, and numpy's.

    Call it before aliases are made that are not parameters or buffers: such an alias would keep the old
    memory. Tensors that share a storage share the new one.
    """
    fixed: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in _tensors(modules):
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.resizable():
            fixed[storage._cdata].append(tensor)
    for tensors in fixed.values():
        owned = tensors[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
        for tensor in tensors:
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(owned, *layout)


def _tensors(modules: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every parameter and buffer once, by module: those of a layer are neighbours."""
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor that shares its memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)
