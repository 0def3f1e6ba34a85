"""Weights on their way to a GPU: each layer waits for its own, so the first forward overlaps the copies."""

from __future__ import annotations

import threading
from typing import Any

import torch

from skim.models.storages import wait_for


class Arrivals:
    """The copies of one model that may still be under way. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._waiting: dict[Any, Any] = {}  # events by layer; each waits when the layer is called
        self._begun: tuple[Any, int] | None = None  # an event before the copies of a move, and bytes
        self._timed: list[tuple[Any, Any, int]] = []  # moves: events before and after all copies, and bytes
        self._lock = threading.Lock()  # of both: `finished` is asked by any thread

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, size: int) -> torch.cuda.Stream | None:
        """The stream to copy `size` bytes on; None to copy at once."""
        if self._device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record(self._stream)
        with self._lock:
            self._begun = before, size
        return self._stream

    def expect(self, layer: Any, event: Any) -> None:
        """Have the next call of `layer` wait for an event. Without a layer, the current stream waits now."""
        if event is None:
            return
        if layer is None:
            wait_for(event, self._device)
        else:
            self._waiting[layer] = event
            _call_first(layer, lambda: self._arrived(layer))

    def end(self) -> None:
        """All copies were launched."""
        with self._lock:
            if self._stream is not None and self._begun is not None:
                after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                after.record(self._stream)
                before, size = self._begun
                self._timed.append((before, after, size))
                self._begun = None

    def cancel(self) -> None:
        """Nothing arrives."""
        with self._lock:
            self._begun = None
        self.wait()

    def wait(self) -> None:
        """Have the current stream wait for all copies."""
        for layer in list(self._waiting):
            _call_plainly(layer)
            self._arrived(layer)

    def finished(self) -> tuple[int, float] | None:
        """Bytes and seconds of the oldest move whose copies are complete, each once."""
        with self._lock:
            if not self._timed or not self._timed[0][1].query():
                return None
            before, after, size = self._timed.pop(0)
            return size, before.elapsed_time(after) / 1e3

    def _arrived(self, layer: Any) -> None:
        wait_for(self._waiting.pop(layer), self._device)


def _call_first(layer: Any, before: Any) -> None:
    """Run `before` at the next call of a layer, outside of its compiled code, and never again.

    A forward hook would be compiled with the layer, and compiled anew whenever it comes or goes. So the
    layer's call is replaced in the place where torch keeps the compiled one, until it is first called.
    """
    compiled = layer._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        layer._compiled_call_impl = compiled
        before()
        return (compiled or layer._call_impl)(*args, **kwargs)

    call.skim_compiled = compiled  # type: ignore[attr-defined]
    layer._compiled_call_impl = call


def _call_plainly(layer: Any) -> None:
    """Undo `_call_first`."""
    layer._compiled_call_impl = layer._compiled_call_impl.skim_compiled
