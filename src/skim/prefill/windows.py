"""Reading a prompt in windows: what the model-based scorers run instead of one long forward.

A window is a piece of the prompt with the question behind it. Each window is read by itself, at positions
from 0, so the cost grows with the length of the prompt and not with its square, no window is longer than
the model has seen in training, and a passage is judged alike wherever in the prompt it stands. Windows of
one batch stand side by side in one flattened run without padding; nothing is written to a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from skim.attention.plain import merge, visible
from skim.attention.step import AttentionCall, Role, Row
from skim.attention.torch_backend import Piece, attend_piece
from skim.errors import SkimError

Heads = Mapping[int, tuple[int, ...] | None]
"""Which heads of which layers are listened to; None for all heads of a layer."""


class ScoringError(SkimError):
    """A scorer cannot score this prompt. The request is then prefilled densely, and the failure counted."""


@dataclass(frozen=True)
class Window:
    """Tokens that are read together: `leading` ones for attention to rest on, the context, the question."""

    tokens: tuple[int, ...]
    leading: int = 0
    asking: int = 0

    @property
    def context(self) -> slice:
        return slice(self.leading, len(self.tokens) - self.asking)


class _EnoughError(Exception):
    """Ends a forward from inside: the layers above the last one that is listened to need not run.

    Raised in the attention function and caught around the module's call, so that a model stops half-way
    although its code, which is not ours, knows nothing of it. It never leaves this file.
    """


@dataclass(frozen=True)
class _Group:
    """Neighbouring windows of one shape: `count` windows of `length` tokens from token `start` on."""

    start: int
    count: int
    length: int
    window: Window  # one of them

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [count, heads, length, dim]"""
        own = flat[self.start : self.start + self.count * self.length]
        return own.reshape(self.count, self.length, *own.shape[1:]).transpose(1, 2)


class WindowStep:
    """Stands in for a step (`skim_step`): causal attention inside each window, and an ear at some heads.

    `heard[layer]` has for each window the most attention that any token of the question pays to each
    context token, head by head: [heads, context], float32. These are probabilities of the full softmax,
    with the question's own tokens, the window's first token and the model's sinks in the denominator. A
    window with nothing to find spends its attention there, and that is what makes the scores of different
    windows comparable.
    """

    def __init__(self, windows: Sequence[Window], heads: Heads) -> None:
        self.windows = tuple(windows)
        self.heard: dict[int, list[torch.Tensor]] = {layer: [] for layer in sorted(heads)}
        self._heads = heads
        self._last = max(heads, default=None)

    @cached_property
    def _groups(self) -> list[_Group]:
        groups, start = [], 0
        for (length, _, _), same in groupby(self.windows, key=lambda w: (len(w.tokens), w.leading, w.asking)):
            windows = list(same)
            groups.append(_Group(start, len(windows), length, windows[0]))
            start += len(windows) * length
        return groups

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        if layer in self.heard:
            for group in self._groups:
                self.heard[layer].extend(
                    question_attention(
                        group.of(query), group.of(key), group.window, call, self._heads[layer]
                    ).unbind(0)
                )
        if layer == self._last:
            raise _EnoughError
        out = [
            _causal(group.of(query), group.of(key), group.of(value), call).transpose(1, 2).flatten(0, 1)
            for group in self._groups
        ]
        return torch.cat(out) if len(out) > 1 else out[0]


def question_attention(
    query: torch.Tensor,  # [windows, query_heads, length, key_dim]
    key: torch.Tensor,  # [windows, kv_heads, length, key_dim]
    window: Window,
    call: AttentionCall,
    heads: Sequence[int] | None,
) -> torch.Tensor:
    """The most attention each context token gets from a question token. [windows, heads, context]

    Only rows of the question are computed: asking x length scores a head, never length x length.
    """
    group = query.shape[1] // key.shape[1]
    chosen = torch.tensor(range(query.shape[1]) if heads is None else list(heads), device=query.device)
    length = query.shape[2]
    asks = slice(length - window.asking, length)
    asked = query[:, chosen, asks] * call.scale
    scores = torch.matmul(asked, key[:, chosen // group].transpose(2, 3)).float()  # [.., asking, length]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    places = torch.arange(length, device=query.device)
    scores = scores.masked_fill(~visible(places[asks], places, call.window), float("-inf"))
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if call.sinks is not None:
        total = torch.logaddexp(total, call.sinks.float()[chosen][:, None, None])
    return torch.exp(scores[..., window.context] - total).amax(dim=2)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attention inside each window. [windows, query_heads, length, value_dim]"""
    length = query.shape[2]
    if query.is_cuda and call.softcap is None and call.sinks is None:
        mask = None
        if call.window is not None and call.window < length:
            places = torch.arange(length, device=query.device)
            mask = visible(places, places, call.window)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=call.scale, enable_gqa=True
        )
    row = Row(Role.PREFILL, (), 0, length)
    return torch.stack(
        [
            merge(attend_piece(q, Piece(k, v, (range(length),), own=True), row, call), call.sinks)
            for q, k, v in zip(query, key, value, strict=True)
        ]
    )


@torch.inference_mode()
def run(module: Any, step: WindowStep) -> Any:
    """One forward over the step's windows; None if it was stopped after the last layer listened to."""
    tokens = [token for window in step.windows for token in window.tokens]
    places = [place for window in step.windows for place in range(len(window.tokens))]
    try:
        return module(
            input_ids=torch.tensor([tokens], device=module.device),
            position_ids=torch.tensor([places], device=module.device),
            use_cache=False,
            skim_step=step,
        )
    except _EnoughError:
        return None


def listen(module: Any, windows: Sequence[Window], heads: Heads) -> list[torch.Tensor]:
    """What the chosen heads attend to: for each window [heads, context], layers in ascending order."""
    step = WindowStep(windows, heads)
    run(module, step)
    heard = [torch.cat(rows) for rows in zip(*step.heard.values(), strict=True)]
    if not all(bool(torch.isfinite(rows).all()) for rows in heard):
        raise ScoringError(
            "the drafter's attention is not finite (a damaged model, or float16 overflow); "
            "use another dtype or another scorer"
        )
    return heard


def cut(places: Sequence[int], most: int, per_batch: int) -> Iterator[list[Sequence[int]]]:
    """As few runs of at most `most` places as possible, of nearly equal lengths, in batches."""
    count = len(places)
    pieces = -(-count // most)
    runs = [places[i * count // pieces : (i + 1) * count // pieces] for i in range(pieces)]
    for first in range(0, pieces, per_batch):
        yield runs[first : first + per_batch]
