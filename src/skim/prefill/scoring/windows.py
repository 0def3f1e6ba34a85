"""Reading a prompt in windows: what the model-based scorers run instead of one long forward.

A window is a piece of the prompt with the question behind it. Each window is read by itself, at positions
from 0, so the cost grows with the length of the prompt and not with its square, no window is longer than
the model has seen in training, and a passage is judged alike wherever in the prompt it stands. Windows of
one batch stand side by side in one flattened run; nothing is written to a pool.

Nothing here waits for a device: what is heard stays where it was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from skim.attention.cpu.torch_backend import Piece, attend_piece
from skim.attention.plain import merge, visible
from skim.attention.step import Attention, AttentionCall, Role, Row
from skim.device import arrays_to_device
from skim.errors import SkimError

Heads = Mapping[int, tuple[int, ...] | None]
"""Which heads of which layers are listened to; None for all heads of a layer."""

SCORES = 1 << 26  # most attention scores that are written out at once
_CUDA_WORK = 11e12  # weights x tokens in one forward: about 60 ms on an H200, between which decode rows move
_CUDA_TOKENS = 1 << 17  # in one forward, however small the model is
# cuDNN makes a plan for each new shape, and almost every prompt has one: so it is not the first choice.
_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


class ScoringError(SkimError):
    """A scorer cannot score this prompt. The request is then prefilled densely, and the failure counted."""

    def __init__(self, message: str, reason: str = "scorer_failed") -> None:
        super().__init__(message)
        self.reason = reason
        """A short word for the metrics."""


@dataclass(frozen=True)
class Batch:
    """Windows that are read in one forward, padded behind their ends to one length.

    No token sees a later one, so padding costs its time and changes nothing.
    """

    tokens: np.ndarray  # [windows, length], any token as padding
    ends: np.ndarray  # [windows]: so many tokens of each are its own
    asking: int = 0  # the last ones of them are the question, in every window


class EnoughError(Exception):
    """Ends a forward from inside: the layers above the last one that is listened to need not run.

    Raised in the attention function and caught around the module's call, so that a model stops half-way
    although its code, which is not ours, knows nothing of it. It never leaves `run`.
    """


class Reads(Attention, Protocol):
    """A step that brings its tokens along."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor


class WindowStep:
    """Stands in for a step (`skim_step`): causal attention inside each window, and an ear at some heads.

    `heard[layer]` has the most attention that any token of the question pays to each token of its window,
    head by head: [windows, heads, length], float32. These are probabilities of the full softmax, with the
    question's own tokens, the window's first token and the model's sinks in the denominator. A window with
    nothing to find spends its attention there, and that is what makes the scores of different windows
    comparable.
    """

    def __init__(self, batch: Batch, heads: Heads, device: torch.device) -> None:
        self.heard: dict[int, torch.Tensor] = {}
        self._heads = heads
        self._last = max(heads, default=None)
        count, length = batch.tokens.shape
        self._shape = count, length
        tokens, ends = arrays_to_device([batch.tokens, batch.ends], device)
        self.input_ids = tokens.reshape(1, -1)
        self._places = torch.arange(length, device=device)
        self.position_ids = self._places.repeat(1, count)
        self._asks = ends[:, None] + torch.arange(-batch.asking, 0, device=device)  # [windows, asking]
        self._masks: dict[int | None, torch.Tensor] = {}  # by the layers' window

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        # views, [windows, heads, length, dim]
        query, key, value = (
            t.reshape(*self._shape, *t.shape[1:]).transpose(1, 2) for t in (query, key, value)
        )
        if layer in self._heads:
            self.heard[layer] = question_attention(
                query, key, self._asks, self._unseen(call.window), call, self._heads[layer]
            )
        if layer == self._last:
            raise EnoughError
        return _causal(query, key, value, call).transpose(1, 2).flatten(0, 1)

    def _unseen(self, window: int | None) -> torch.Tensor:
        """Which tokens of its window each token of the question may not read. [windows, 1, asking, length]"""
        if window not in self._masks:
            seen = visible(self._asks.reshape(-1), self._places, window)
            self._masks[window] = ~seen.view(self._asks.shape[0], 1, *self._asks.shape[1:], -1)
        return self._masks[window]


def question_attention(
    query: torch.Tensor,  # [windows, query_heads, queries, key_dim]
    key: torch.Tensor,  # [windows, kv_heads, length, key_dim]
    asks: torch.Tensor,  # [windows, asking]: which of the queries are the question's
    unseen: torch.Tensor,  # [windows, 1, asking, length]: what they may not read
    call: AttentionCall,
    heads: Sequence[int] | None,
) -> torch.Tensor:
    """The most attention each token gets from a token of the question. [windows, heads, length]

    Only rows of the question are computed: asking x length scores a head, never length x length, and of
    these no more than `SCORES` are there at once.
    """
    windows, query_heads, _, dim = query.shape
    kv_heads, length, asking = key.shape[1], key.shape[2], asks.shape[1]
    rows = query.gather(2, asks[:, None, :, None].expand(-1, query_heads, -1, dim)) * call.scale
    sinks = call.sinks
    if heads is None:
        rows = rows.view(windows, kv_heads, -1, dim)  # query heads that share a key head, side by side
    else:
        rows = torch.stack([rows[:, head] for head in heads], dim=1)
        key = torch.stack([key[:, head * kv_heads // query_heads] for head in heads], dim=1)
        sinks = torch.stack([sinks[head] for head in heads]) if sinks is not None else None
    count = query_heads if heads is None else len(heads)
    some = max(1, SCORES // max(1, count * asking * length))
    heard = []
    for first in range(0, windows, some):
        part = slice(first, first + some)
        scores = torch.matmul(rows[part], key[part].transpose(2, 3)).float().view(-1, count, asking, length)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores.masked_fill_(unseen[part], float("-inf"))
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None, None])
        heard.append(scores.sub_(total).amax(dim=2).exp_())
    return torch.cat(heard) if len(heard) > 1 else heard[0]


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attention inside each window. [windows, query_heads, length, value_dim]"""
    length = query.shape[2]
    if not query.is_cuda or call.softcap is not None or call.sinks is not None:
        row = Row(Role.PREFILL, (), 0, length)
        return torch.stack(
            [
                merge(attend_piece(q, Piece(k, v, (range(length),), own=True), row, call), call.sinks)
                for q, k, v in zip(query, key, value, strict=True)
            ]
        )
    mask = None
    if call.window is not None and call.window < length:
        places = torch.arange(length, device=query.device)
        mask = visible(places, places, call.window)
    if mask is None and query.dtype != torch.float32:
        with sdpa_kernel(_ORDER, set_priority=True):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=call.scale, enable_gqa=True
            )
    group = query.shape[1] // key.shape[1]  # the kernel that takes masks and float32 knows no groups
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=call.scale)


@torch.inference_mode()
def run(module: Any, step: Reads) -> Any:
    """One forward over what the step reads; None if it was stopped after the last layer listened to."""
    try:
        return module(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, skim_step=step
        )
    except EnoughError:
        return None


def listen(module: Any, batch: Batch, heads: Heads) -> torch.Tensor:
    """What the chosen heads attend to, layers in ascending order. [windows, heads, length]

    It is not known to be finite; that would have to be waited for (see `check_finite`).
    """
    step = WindowStep(batch, heads, module.device)
    run(module, step)
    return torch.cat([step.heard[layer] for layer in sorted(heads)], dim=1)


def check_finite(finite: bool) -> None:
    if not finite:
        raise ScoringError(
            "the drafter's attention is not finite (a damaged model, or float16 overflow); "
            "use another dtype or another scorer"
        )


def cut(count: int, most: int, per_batch: int) -> Iterator[np.ndarray]:
    """As few runs of at most `most` of `count` things as possible, of nearly equal lengths.

    They come in as few batches as possible, of nearly equal numbers of runs, each as the edges of its runs:
    run i is from edge i to edge i + 1.
    """
    pieces = -(-count // most)
    edges = np.arange(pieces + 1) * count // max(1, pieces)
    batches = -(-pieces // per_batch)
    for index in range(batches):
        yield edges[index * pieces // batches : (index + 1) * pieces // batches + 1]


def windows_per_batch(module: Any, layers: int, length: int) -> int:
    """Windows of `length` tokens that are read at once, by so many layers.

    On the CPU one, so that decode steps can come between. On a GPU as many as fill it, and no more than it
    reads in a moment.
    """
    if module.device.type != "cuda":
        return 1
    if module not in _weights:
        _weights[module] = _count_weights(module)
    read = max(1, _weights[module] * layers // int(module.config.get_text_config().num_hidden_layers))
    return max(1, min(_CUDA_TOKENS, int(_CUDA_WORK / read)) // length)


_weights: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _count_weights(module: Any) -> int:
    """Those of the layers, without the tables at either end. To count them takes a millisecond."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    tables = {id(end.weight): end.weight.numel() for end in ends if end is not None}  # one, if they are tied
    return int(sum(one.numel() for one in module.parameters()) - sum(tables.values()))
