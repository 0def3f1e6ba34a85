"""Reading a prompt in one pass, each token after all before it: what windows save, where it is asked for.

The pass goes in chunks through a pool of its own, by the same backends as a target's: decode rows move in
between, and chunks read chosen blocks only where a policy says so. Layers above the last one that is listened
to are not run. On a GPU that the kernels take, nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.cpu.native import choose_backend
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.plain import visible
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.device import arrays_to_device
from skim.memory.pool import KVPool, LayerShape
from skim.prefill.scoring.windows import SCORES, EnoughError, Heads, question_attention, run

CHUNK = 512  # tokens in one forward, the question beside them in the last
CUDA_CHUNK = 8192


class Ear:
    """What some heads of the question attend to: keys are noted chunk by chunk, and asked with the last.

    `heard[layer]` is as that of a `WindowStep` over the whole prompt: [1, heads, length], float32.
    """

    def __init__(self, heads: Heads, length: int, asking: int, device: torch.device) -> None:
        self.heads = heads
        self.heard: dict[int, torch.Tensor] = {}
        self._asking = asking
        self._keys: dict[int, torch.Tensor] = {}  # of each layer, [length, kv_heads, dim]
        self._places = torch.arange(length, device=device)

    def note(self, layer: int, start: int, key: torch.Tensor) -> None:
        """Keys from `start` on. [tokens, kv_heads, dim]"""
        if layer not in self._keys:
            self._keys[layer] = key.new_empty(len(self._places), *key.shape[1:])
        self._keys[layer][start : start + len(key)] = key

    def ask(self, layer: int, query: torch.Tensor, call: AttentionCall) -> None:
        """Queries of the last chunk, which ends with the question. [tokens, query_heads, dim]"""
        key = self._keys.pop(layer).transpose(0, 1)[None]
        query = query[-self._asking :].transpose(0, 1)[None]
        heads = self.heads[layer]
        length = len(self._places)
        some = max(1, SCORES // (length * (query.shape[1] if heads is None else len(heads))))
        best: torch.Tensor | None = None
        for first in range(0, self._asking, some):
            asks = torch.arange(first, min(first + some, self._asking), device=query.device)
            seen = visible(self._places[asks - self._asking], self._places, call.window)
            heard = question_attention(query, key, asks[None], ~seen[None, None], call, heads)
            best = heard if best is None else torch.maximum(best, heard)
        assert best is not None
        self.heard[layer] = best


class ChunkStep:
    """Stands in for a step (`skim_step`) that it hands on, with an ear at some heads."""

    def __init__(self, step: Step, ids: torch.Tensor, ear: Ear) -> None:
        [row] = step.rows
        self.input_ids = ids[None, row.context : row.length]
        self.position_ids = torch.arange(row.context, row.length, device=ids.device)[None]
        self._step = step
        self._start = row.context
        self._ear = ear
        self._ends = row.length == row.prompt

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        if layer in self._ear.heads:
            self._ear.note(layer, self._start, key)
            if self._ends:
                self._ear.ask(layer, query, call)
            if layer == max(self._ear.heads):
                raise EnoughError
        return self._step.attend(layer, query, key, value, call)


def listen_in_full(
    module: Any,
    layers: Sequence[LayerShape],  # of the module
    tokens: np.ndarray,  # [length], the question at the end
    asking: int,
    heads: Heads,
    *,
    policy: Policy | None = None,
    counter: BlockCounter | None = None,  # of the blocks that a policy saw and read
    chunk: int | None = None,
) -> Generator[None, None, torch.Tensor]:
    """What the chosen heads attend to, layers in ascending order. [1, heads, length]

    Lets go after every chunk. As of `listen`, it is not known to be finite.
    """
    device = module.device
    length = len(tokens)
    chunk = chunk or (CUDA_CHUNK if device.type == "cuda" else CHUNK)
    read = layers[: max(1, max(heads))]  # the last one that is listened to gives keys, and needs no others
    dtype = next(module.parameters()).dtype
    blocks = -(-length // BLOCK)
    size = blocks * BLOCK * sum(layer.width for layer in read) * dtype.itemsize
    pool = KVPool(read, block_size=BLOCK, budget_bytes=size, dtype=dtype, device=device)
    table = pool.allocate(blocks)
    # What the CPU's own backend is better at is rows of one query.
    backend = choose_backend(pool) if device.type == "cuda" else TorchBackend()
    if counter is not None:
        backend.counter = counter
    [ids] = arrays_to_device([tokens], device)
    ear = Ear(heads, length, asking, device)
    edges = [*range(0, max(1, length - asking), chunk), length]
    for start, end in pairwise(edges):
        row = Row(Role.PREFILL, table, start, end - start, policy=policy, prompt=length)
        step = Step(pool, (row,), backend)
        try:
            run(module, ChunkStep(step, ids, ear))
        finally:
            step.notes.clear()  # they refer to the step, and both to the pool
        yield
    return torch.cat([ear.heard[layer] for layer in sorted(heads)], dim=1)
