"""Residency: a model's weights are on the device, in host memory, or on disk only, and move as a whole.

A move first makes all copies, then frees, or first fills everything, then counts as done. So if memory, disk
or a read fails, the model is where it was. On a CPU the device is host memory: parked weights go to the
scratch file.

Copies stay when the model returns, because weights never change: the next park copies nothing. Only where
host memory is short, the copy in it is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from skim.errors import MoveError, ParkedError, first_line
from skim.memory.budget import free_bytes, in_words
from skim.models.arrival import Arrivals
from skim.models.forwards.eight_bits import EightBitOps, for_ranking
from skim.models.offload import HostLayers
from skim.models.residency_state import Direction, Place, ResidencyState, Standing, Transfer, TransferCounts
from skim.models.scratch import ScratchFile, give_back_memory
from skim.models.storages import Storages

log = logging.getLogger(__name__)


class Residency:
    """Moves the weights of one model. Engines that share the model share this object and its lock.

    Hold `lock` while the module runs.
    """

    def __init__(self, name: str, module: Any, device: torch.device, host: HostLayers | None = None) -> None:
        """`host`: layers that are on the host in any case. They are not moved."""
        self.lock = threading.RLock()
        self.place = Place.RESIDENT
        self.holds: set[Any] = set()
        """Parks of administrators that wait or have happened: new requests for the model are refused."""
        self.kept_away = False
        """True once such a park has happened: only an administrator brings the model back."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Engines that run the module. Their `uses` is True while one has unfinished work that needs it."""
        self.role: str | None = None
        """`target` or `drafter`, for messages: the role in the engine that took the model last."""
        self.is_idle = False
        """True after a park when idle, until the next move."""
        self.relocations = 0
        """Returns to other addresses than before. A CUDA graph is valid only while this is unchanged."""
        self._name = name
        self._module = module
        self._device = device
        self._host = host
        self._groups: list[tuple[Any, Storages]] = []  # a layer, or None, and its weights
        self._table: Storages | None = None  # input embeddings: one of the groups
        self._file: ScratchFile | None = None
        self._left_from: tuple[int, ...] = ()  # addresses before the last park
        self._guards: list[Any] = []
        self._arrivals = Arrivals(device)
        self._moves = 0  # changes of what is on the device
        self._measured = -1, 0  # the move after which it was measured, and bytes
        self._transfers = TransferCounts()

    @property
    def _label(self) -> str:
        return self._name if self.role is None else f"the {self.role} {self._name}"

    @property
    def is_resident(self) -> bool:
        return self.place is Place.RESIDENT

    @property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(address for _, storages in self._groups for address in storages.addresses)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that are on the device now."""
        moves, (known, size) = self._moves, self._measured
        if known != moves:
            size = _live_bytes(self._module, self._device)
            self._measured = moves, size  # out of date if something has moved meanwhile
        return size

    def recount(self) -> None:
        """Weights have come, or gone: measure again."""
        self._moves += 1

    @property
    def streams(self) -> bool:
        """True if layers come from the host in every forward, to other addresses: none may be captured."""
        return self._host is not None and self._host.count > 0

    @property
    def size(self) -> int:
        """Bytes of the weights that are on the device while the model is resident."""
        return self.device_bytes if self.is_resident else sum(one.bytes for _, one in self._groups)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of input embeddings."""
        find = getattr(self._module, "get_input_embeddings", None)
        return 0 if find is None else sum(one.nbytes for one in (*find().parameters(), *find().buffers()))

    def check(self) -> None:
        """Raise ParkedError unless the weights are on the device."""
        if not self.is_resident:
            raise ParkedError(f"{self._label} is {self.place}: its weights are not on {self._device}")

    @property
    def by_admin(self) -> bool:
        """True if an administrator has parked the model, or a park waits for requests that use it."""
        return bool(self.holds)

    @property
    def standing(self) -> Standing:
        """Why it is where it is. Called from any thread."""
        if self.kept_away:
            return Standing.HELD
        if self.by_admin:
            return Standing.PARK_WAITS
        if self.is_resident:
            return Standing.READY
        return Standing.IDLE if self.is_idle else Standing.POLICY

    def state(self, role: str) -> ResidencyState:
        """Its place and sizes. Called from any thread: during a move, they may not fit each other."""
        groups = [storages for _, storages in self._groups]
        self._note_arrivals()
        file = self._file  # a move may replace it meanwhile
        transfers, last = self._transfers.read()
        return ResidencyState(
            model=self._name,
            role=role,
            place=self.place,
            standing=self.standing,
            device_bytes=self.device_bytes,
            host_bytes=sum(one.host_bytes for one in groups) + (self._host.host_bytes if self._host else 0),
            disk_bytes=0 if file is None else file.bytes,
            transfers=transfers,
            last=last,
        )

    def park(self, to: Place = Place.PARKED, *, keep_table: bool = False) -> None:
        """Move the weights off the device. With `keep_table`, the table of input embeddings is on it then.

        Raises MoveError if that fails; then the model is where it was.
        """
        if to is Place.RESIDENT:
            raise ValueError("a model is brought to the device by unpark")
        with self.lock:
            if self.is_resident:
                self._survey()
                self._left_from = self._addresses
            staying = [(None, self._table)] if keep_table and self._table is not None else []
            leaving = [one for _, one in self._groups if not (keep_table and one is self._table)]
            if self.place is to and not any(one.resident for one in leaving):
                self._bring(staying)
                return
            begun = time.perf_counter()
            self.settle()
            on_disk = to is Place.RELEASED or self._device.type == "cpu"
            copied = self._copy(leaving, on_disk=on_disk)
            self._bring(staying)
            if on_disk:
                for storages in leaving:
                    storages.drop_host_copy()
            gone = {identity for one in leaving for identity in one.identities}
            for storages in leaving:
                if storages.resident:
                    storages.free()
            if isinstance(rounding := for_ranking(), EightBitOps):
                rounding.forget(gone)
            if self._device.type == "cpu":
                give_back_memory()
            self.place, self.is_idle = to, False
            self._guard()
            self._note(Direction.TO_DISK if on_disk else Direction.TO_HOST, copied, begun)

    def unpark(self) -> None:
        """Bring the weights to the device. Raises MoveError if that fails; then the model stays parked.

        On a GPU the copies run on a side stream, and each layer waits for its own when it is first called.
        """
        with self.lock:
            if self.is_resident:
                return
            self._note_arrivals()
            begun = time.perf_counter()
            copied = sum(one.bytes for _, one in self._groups if not one.resident)
            short = free_bytes(torch.device("cpu")) < sum(one.host_bytes for _, one in self._groups)
            stream = self._arrivals.begin(copied)
            self._bring(self._groups, stream)
            self._arrivals.end()
            if short:
                for _, storages in self._groups:
                    storages.drop_host_copy()
            self.relocations += self._addresses != self._left_from
            self.place, self.is_idle = Place.RESIDENT, False
            for guard in self._guards:
                guard.remove()
            self._guards.clear()
            if stream is None:
                self._note(Direction.TO_DEVICE, copied, begun)

    def _bring(self, groups: list[tuple[Any, Storages]], stream: torch.cuda.Stream | None = None) -> None:
        """Fill storages that are not on the device: all, or none if that fails."""
        filled: list[Storages] = []
        try:
            for layer, storages in groups:
                if not storages.resident:
                    event = storages.fill(stream)
                    filled.append(storages)
                    self._arrivals.expect(layer, event)
        except Exception as error:
            self._arrivals.cancel()
            for storages in filled:
                storages.free()
            size = in_words(sum(one.bytes for _, one in groups))
            raise MoveError(
                f"{self._label} could not be brought to {self._device}: {first_line(error)}; it stays "
                f"{self.place}, and its {size} need free memory there"
            ) from error
        finally:
            self.recount()

    def settle(self) -> None:
        """Have the current stream wait until all weights have arrived. A replayed graph needs them all."""
        if self._arrivals:
            self._arrivals.wait()

    def forget_replaced(self) -> None:
        """Free weights that packing has replaced, and their copies. The model must be resident."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        live = {one.untyped_storage()._cdata for one in tensors}
        self._groups = [(layer, one) for layer, one in self._groups if one.identities <= live]
        self.recount()

    def _survey(self) -> None:
        """Find the storages of table, layers and rest. Copies stay unless the module has other storages."""
        find = getattr(self._module, "get_input_embeddings", None)
        table = Storages.of(find()) if find is not None else Storages(())
        found = [(None, table), *_groups_of(self._module, table)]
        if _identities(found) != _identities(self._groups):
            self._groups = [(layer, one) for layer, one in found if one.bytes]
            self._table, self._file = table, None

    def _copy(self, leaving: list[Storages], *, on_disk: bool) -> int:
        """Have a copy of all, or of none that has none now. Returns the bytes that were copied."""
        if on_disk and self._file is None:
            try:
                self._file = ScratchFile()
            except OSError as error:
                raise self._stays(error) from error
        before = 0 if self._file is None else self._file.bytes
        new = [one for one in leaving if not (one.disk_bytes if on_disk else one.host_bytes)]
        try:
            if not on_disk:
                _check_room(sum(one.bytes for one in new))
            for storages in new:
                if on_disk:
                    assert self._file is not None
                    storages.keep_file_copy(self._file)
                else:
                    storages.keep_host_copy()
            for storages in leaving:
                storages.check()
        except Exception as error:
            for storages in new:
                if on_disk:
                    storages.drop_file_copy()
                else:
                    storages.drop_host_copy()
            if on_disk and self._file is not None:
                self._file.truncate(before)
            raise self._stays(error) from error
        return sum(one.bytes for one in new)

    def _stays(self, error: Exception) -> MoveError:
        return MoveError(
            f"{self._label} could not be parked: {first_line(error)}; it stays {self.place}; free memory, or "
            "space in the cache directory"
        )

    def _guard(self) -> None:
        """Refuse calls of the module while its weights are away."""
        self.recount()
        if self._guards or not isinstance(self._module, nn.Module):
            return

        def refuse(*_: Any) -> None:
            self.check()

        bodies = {self._module, getattr(self._module, "base_model", self._module)}
        self._guards += [body.register_forward_pre_hook(refuse) for body in bodies]

    def _note(self, direction: Direction, copied: int, begun: float) -> None:
        self._count(Transfer(direction, copied, time.perf_counter() - begun))

    def _note_arrivals(self) -> None:
        while (arrived := self._arrivals.finished()) is not None:
            self._count(Transfer(Direction.TO_DEVICE, *arrived))

    def _count(self, one: Transfer) -> None:
        self._transfers.add(one)
        log.info("%s: %s", self._label, one)


def _groups_of(module: Any, table: Storages) -> Iterator[tuple[Any, Storages]]:
    """Weights after the table, in the order in which a forward needs them: each layer's after the others."""
    layers: list[tuple[Any, Storages]] = []
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            layers.append((part, Storages.of(part, without=[table, *(one for _, one in layers)])))
    yield None, Storages.of(module, without=[table, *(one for _, one in layers)])
    yield from layers


def _check_room(size: int) -> None:
    """Raise MemoryError if host memory has no room for a copy. Mapping it would succeed, and filling it would
    have the system end the process."""
    if size > (free := free_bytes(torch.device("cpu"))):
        raise MemoryError(f"a copy takes {in_words(size)} of host memory, and {in_words(free)} are free")


def _identities(groups: list[tuple[Any, Storages]]) -> frozenset[int]:
    return frozenset(identity for _, one in groups for identity in one.identities)


def _live_bytes(module: Any, device: torch.device) -> int:
    """Bytes of all weights that are on the device now."""
    tensors = (*module.parameters(), *module.buffers())
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values() if one.device.type == device.type)
