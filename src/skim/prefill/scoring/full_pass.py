"""One causal pass over a whole prompt: the question's attention without scoring windows.

The pass runs in prefill chunks through a temporary KV pool and the same backends as a target's prompt. Decode
rows run between chunks, and a policy makes chunks block-sparse. Layers above the last captured one do not
run. With the CUDA kernels, nothing here synchronizes with the device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from skim.attention.backend import choose_backend
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.plain import visible
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.device import arrays_to_device
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from skim.prefill.scoring.features import Capture, Captures, tokens_per_row
from skim.prefill.scoring.scorer import SLICE_SECONDS
from skim.prefill.scoring.windows import (
    StopForwardError,
    Take,
    lengths,
    question_attention,
    run,
    scored_heads,
    tokens_per_slice,
)

CHUNK = 512  # tokens in one forward; the question is added to the last
CUDA_CHUNK = 8192
MAX_SCORES = 1 << 26  # attention scores that exist at once


class QuestionAttention:
    """Captures the question's attention: collects keys chunk by chunk and attends with the last chunk.

    Of values, only the lengths are collected (see `WindowStep`).

    `take` gets the same as that of a `WindowStep` over the whole prompt: [1, rows, length], float32.
    """

    def __init__(
        self, captures: Captures, take: Take, length: int, question: int, device: torch.device
    ) -> None:
        self.captures = captures
        self._take = take
        self._question = question
        self._keys: dict[int, torch.Tensor] = {}  # of each layer, [length, kv_heads, dim]
        self._weights: dict[int, torch.Tensor] = {}  # of each layer, [length, kv_heads]
        self._places = torch.arange(length, device=device)

    def add(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the keys and values of a chunk that begins at `start`. [tokens, kv_heads, dim]"""
        weight = lengths(value)
        if layer not in self._keys:
            self._keys[layer] = key.new_empty(len(self._places), *key.shape[1:])
            self._weights[layer] = weight.new_empty(len(self._places), *weight.shape[1:])
        self._keys[layer][start : start + len(key)] = key
        self._weights[layer][start : start + len(key)] = weight

    def attend(self, layer: int, query: torch.Tensor, call: AttentionCall) -> None:
        """Capture a layer with the queries of the last chunk, which ends with the question.

        query: [tokens, query_heads, dim]
        """
        key, weight = (kept.pop(layer).transpose(0, 1)[None] for kept in (self._keys, self._weights))
        query = query[-self._question :].transpose(0, 1)[None]
        capture = self.captures[layer]
        length, group = len(self._places), tokens_per_row(self._question)
        some = max(1, MAX_SCORES // (length * scored_heads(query, capture)))
        some = max(1, some // group) * group  # tokens that share a row are computed together
        parts: list[torch.Tensor] = []
        sizes: list[int] = []
        for first in range(0, self._question, some):
            part = torch.arange(first, min(first + some, self._question), device=query.device)
            seen = visible(self._places[part - self._question], self._places, call.window)
            parts.append(
                question_attention(query, key, weight, part[None], ~seen[None, None], call, capture, group)
            )
            sizes.append(len(part))
        self._take(layer, join_parts(parts, sizes, capture))


def join_parts(parts: Sequence[torch.Tensor], sizes: Sequence[int], capture: Capture) -> torch.Tensor:
    """The rows of a whole question, from those of its parts, which have `sizes` tokens. [1, rows, length]"""
    if len(parts) == 1:
        return parts[0]
    each = len(capture.each)
    most = parts[0].shape[1] if capture.most is None else len(capture.most)
    mean = most + len(capture.mean)
    shares = [size / sum(sizes) for size in sizes]
    found = [
        torch.stack([part[:, :most] for part in parts]).amax(dim=0),
        torch.stack([s * part[:, most:mean] for s, part in zip(shares, parts, strict=True)]).sum(dim=0),
    ]
    if each:
        own = [part[:, mean:].reshape(1, each, -1, part.shape[2]) for part in parts]
        found.append(torch.cat(own, dim=2).flatten(1, 2))
    return torch.cat(found, dim=1)


class ChunkStep:
    """Stands in for a step (`skim_step`): forwards to it and captures the question's attention."""

    def __init__(self, step: Step, ids: torch.Tensor, question: QuestionAttention) -> None:
        [row] = step.rows
        self.input_ids = ids[None, row.context : row.length]
        self.position_ids = torch.arange(row.context, row.length, device=ids.device)[None]
        self._step = step
        self._start = row.context
        self._question = question
        self._ends = row.length == row.prompt

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        if layer in self._question.captures:
            self._question.add(layer, self._start, key, value)
            if self._ends:
                self._question.attend(layer, query, call)
            if layer == max(self._question.captures):
                raise StopForwardError
        return self._step.attend(layer, query, key, value, call)


def read_prompt(
    module: Any,
    layers: Sequence[LayerShape],  # of the module
    tokens: np.ndarray,  # [length], the question at the end
    question: int,  # its tokens
    captures: Captures,
    take: Take,
    *,
    policy: Policy | None = None,
    counter: BlockCounter | None = None,  # counts the key blocks that a policy could read and did
    chunk: int | None = None,
    seconds: float = SLICE_SECONDS,  # between two yields on a GPU, if less is wanted than a whole chunk takes
) -> Generator[None, None, None]:
    """Read the prompt; `take` gets the question's attention. Yields after every chunk."""
    device = module.device
    length = len(tokens)
    if chunk is None:
        chunk = CUDA_CHUNK if device.type == "cuda" else CHUNK
        if seconds < SLICE_SECONDS and device.type == "cuda":
            some = tokens_per_slice(module, max(captures) + 1, seconds)
            chunk = min(max(some // CHUNK, 1) * CHUNK, CUDA_CHUNK)
    read = layers[: max(1, max(captures))]  # the last captured layer does not attend, so it stores nothing
    dtype = next(module.parameters()).dtype
    blocks = -(-length // BLOCK)
    pool = KVPool.of_blocks(read, blocks, block_size=BLOCK, dtype=dtype, device=device)
    table = pool.allocate(blocks)
    backend = choose_backend(pool, decodes=False)
    if counter is not None:
        backend.counter = counter
    [ids] = arrays_to_device([tokens], device)
    attention = QuestionAttention(captures, take, length, question, device)
    edges = [*range(0, max(1, length - question), chunk), length]
    for start, end in pairwise(edges):
        row = Row(Role.PREFILL, table, start, end - start, policy=policy, prompt=length)
        step = Step(pool, (row,), backend)
        run(module, ChunkStep(step, ids, attention))
        yield
