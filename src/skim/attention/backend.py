"""The contract of attention backends, and the one function that chooses a backend.

A backend writes a step's new keys and values into the pool and attends over the slots that each row may read.
It prepares metadata once a step, for all layers. A capturable backend also gives CUDA graphs their buffers:
these stay in place and are refilled for every step. The engine knows this contract and no particular backend.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from skim.attention.step import AttentionCall, Step
from skim.memory.pool import KVPool

if TYPE_CHECKING:
    from skim.attention.blocksparse.counter import BlockCounter

log = logging.getLogger(__name__)


class GraphBuffers(Protocol):
    """The metadata of captured steps, in buffers whose addresses stay the same."""

    def refill(self, step: Step) -> Hashable:
        """Take over a step's rows; rows and tokens beyond them become padding. Returns the graph key.

        A graph captured for a key may be replayed for every step with that key and these buffers.
        """

    def metadata(self, step: Step, key: Hashable) -> Any:
        """Metadata for a step over these buffers, as last refilled, to be run or captured under `key`."""


class Backend(ABC):
    """Writes a step's new keys and values into the pool and attends over the slots each row may read."""

    counter: BlockCounter
    """Blocks of keys that block-sparse chunks read."""

    @abstractmethod
    def prepare(self, step: Step) -> Any:
        """The metadata that layers share. It must not refer to the step, which refers to it."""

    @abstractmethod
    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        """Store the new keys and values, then attend. [tokens, query_heads, value_dim]"""

    def store(self, step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Store the new keys and values, and attend to nothing. False if nothing was done."""
        return False


class CapturableBackend(Backend):
    """A backend whose steps may be captured as CUDA graphs: rows of one query, or of several each.

    Rows of several queries have no policy.
    """

    @abstractmethod
    def refuses_capture(self, step: Step) -> str | None:
        """The reason a step cannot run as a graph, as a metric label; None if it can."""

    @abstractmethod
    def graph_buffers(self, pool: KVPool, rows: int, slots: int, queries: int) -> GraphBuffers:
        """Buffers for steps of up to `rows` rows, each of up to `slots` slots and `queries` queries."""


def choose_backend(pool: KVPool, *, decodes: bool = True) -> Backend:
    """The fastest backend that works for this pool; the log says why a faster one does not.

    Without decode rows the decode kernels of the native CPU backend are not needed, and not checked.
    """
    from skim.attention.cpu.torch_backend import TorchBackend

    if pool.device.type == "cuda":
        try:
            from skim.attention.cuda.backend import TritonBackend
        except ImportError as reason:
            log.warning("attention uses torch and is slow, Triton is not available: %s", reason)
            return TorchBackend()
        refusal = TritonBackend.refuses(pool)
        if refusal is None:
            return TritonBackend()
        log.warning("attention uses torch and is slow, the Triton kernels do not apply: %s", refusal)
    elif pool.device.type == "cpu":
        from skim.attention.cpu.native import make_native, make_prefill
        from skim.native.build import NativeUnavailable

        if not decodes:
            return make_prefill(pool) or TorchBackend()
        try:
            return make_native(pool)
        except NativeUnavailable as reason:
            log.info("decode uses torch's attention, the native kernel is not available: %s", reason)
    return TorchBackend()
