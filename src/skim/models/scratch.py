"""Bytes of tensors outside the device: in host memory, pinned where possible, or in a scratch file.

Pinned memory is mapped and registered here, not taken from torch. Torch rounds every piece up to a power of
two and keeps freed pieces, so a parked model would take up to twice its size, and releasing it would free
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from skim import cache

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes: copies between host and device are fastest at such addresses
PIECE = 64 << 20  # bytes of a CUDA tensor that pass through host memory at once, to a file or from it


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. Not `Tensor.numpy`: torch never resizes a storage
    again that numpy has seen, even after the array is gone."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def give_back_memory() -> None:
    """Give freed host memory back to the system. The C library keeps pieces below 32 MB for itself."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class HostCopy:
    """Tensors of bytes in host memory: `parts`. They are pinned if `pinned`, and if the system allows it."""

    def __init__(self, sizes: Sequence[int], *, pinned: bool) -> None:
        *starts, self.bytes = itertools.accumulate((_rounded(size) for size in sizes), initial=0)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping has small pages
        mapped = mmap.mmap(-1, max(self.bytes, 1), flags=private)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # pages of 2 MB are pinned faster
            with contextlib.suppress(OSError):  # a kernel without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.parts = [memory[start:][:size] for start, size in zip(starts, sizes, strict=True)]
        self.pinned = pinned and _pin(memory)
        if self.pinned:
            weakref.finalize(self, _unpin, memory).atexit = False


class ScratchFile:
    """An unlinked file in the cache directory: it ends with this object, and with the process at the latest.

    Every write is appended. A write that fails leaves the file as it was.
    """

    def __init__(self) -> None:
        directory = cache.root()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self.bytes = 0

    def append(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Write tensors of bytes; returns where each begins."""
        before, starts = self.bytes, []
        try:
            # Where space can be reserved, a full disk is noticed before the transfer, not in its middle.
            total = sum(tensor.nbytes for tensor in tensors)
            if total and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), before, total)
            for tensor in tensors:
                starts.append(self.bytes)
                for piece in tensor.split_with_sizes(_pieces(len(tensor))):
                    held = piece.cpu()  # by name: the view of its memory does not keep it
                    self._write(memory_of(held))
        except BaseException:
            self.truncate(before)
            raise
        return starts

    def truncate(self, size: int) -> None:
        """Give back everything after the first `size` bytes."""
        os.ftruncate(self._file.fileno(), size)
        self.bytes = size

    def read(self, start: int, tensor: torch.Tensor) -> None:
        """Read into a tensor of bytes. Raises OSError if the file cannot be read in full."""
        for piece in tensor.split_with_sizes(_pieces(len(tensor))):
            held = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
            self._read(start, memory_of(held))
            if held is not piece:
                piece.copy_(held)
            start += len(piece)

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], self.bytes + done)
        self.bytes += done

    def _read(self, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], start + done)
            if count == 0:
                raise OSError(f"a scratch file of {self.bytes} bytes ends at {start + done}")
            done += count


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pieces(size: int) -> list[int]:
    return [min(PIECE, size - start) for start in range(0, size, PIECE)]


def _pin(memory: torch.Tensor) -> bool:
    """Register memory for direct copies to and from CUDA devices; False if the system refuses."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        log.warning("%d bytes of host memory cannot be pinned (CUDA error %d): slower", memory.nbytes, code)
        with contextlib.suppress(
            RuntimeError
        ):  # torch reports the error at the next launch: let it be this one
            torch.ones(1, device="cuda")
    return not code


def _unpin(memory: torch.Tensor) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cuda.cudaHostUnregister(memory.data_ptr())
