"""Turns the question's attention to tokens, in scoring windows, into scores of prompt blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from skim.device import arrays_to_device, to_host, until_computed
from skim.prefill.scoring.native_rows import Places, QuestionKernel, question_kernel
from skim.prefill.scoring.scorer import ScoringTask, handing_over
from skim.prefill.scoring.windows import Batch, Take, check_finite

_SMOOTH = 5  # tokens averaged before a block's maximum is taken
_EDGE = 0.25  # share of a block's tokens, at either edge, that also count for its neighbour
_SOFTER = 0.75  # their weight there

Reduce = Callable[[Mapping[int, torch.Tensor]], torch.Tensor]
"""Makes one tensor of the captured rows of each layer, [rows, read blocks], on their device."""


@dataclass(frozen=True)
class Joined:
    """Scoring windows, and the columns in them of the prompt's tokens."""

    batch: Batch
    columns: np.ndarray  # [windows, places]: the column of each place in its window
    places: np.ndarray  # [windows, places], ascending: indices of prompt tokens
    counts: np.ndarray  # [windows]: number of places; entries after them are padding


def join(places: np.ndarray, edges: np.ndarray, prompt: np.ndarray, question: np.ndarray) -> Joined:
    """Scoring windows of the tokens at these places, cut at the edges, each followed by the question.

    The prompt's first token is put before each window and into every gap. Models rest their attention on the
    first token, and the start of a torn sentence draws less attention after it.
    """
    own, starts, counts = places[edges[0] : edges[-1]], edges[:-1] - edges[0], np.diff(edges)
    torn = np.ones(len(own), dtype=bool)
    torn[1:] = own[1:] != own[:-1] + 1
    torn[starts] = True
    leading = np.cumsum(torn)
    window = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(own)) - starts[window]  # of a place in its window
    column = index + leading - leading[starts][window] + 1
    ends = column[starts + counts - 1] + 1 + len(question)
    tokens = np.full((len(counts), int(ends.max())), prompt[0])
    tokens[window, column] = prompt[own]
    tokens[np.arange(len(counts))[:, None], ends[:, None] + np.arange(-len(question), 0)] = question
    columns, kept = np.zeros((2, len(counts), int(counts.max())), dtype=np.int64)
    columns[window, index] = column
    kept[window, index] = own
    return Joined(Batch(tokens, ends, len(question)), columns, kept, counts)


class BlockScores:
    """The best smoothed attention to each block, for every captured row, over all scoring windows.

    Memory grows with the blocks, not with their tokens: each layer's attention is reduced when it is taken.
    """

    def __init__(self, task: ScoringTask, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._best: dict[int, torch.Tensor] = {}  # by layer, [rows, blocks]
        self._finite: list[torch.Tensor] = []

    @torch.inference_mode()
    def taker(self, joined: Joined) -> Take:
        """Takes the attention captured in these windows, layer by layer."""
        if self._device.type == "cpu" and (native := question_kernel()) is not None:
            return self._native_taker(joined, native)
        size = self._task.block_size
        own = np.arange(joined.places.shape[1]) < joined.counts[:, None]  # [windows, places], without padding
        places = joined.places[own]
        blocks, rank = np.unique(places // size, return_inverse=True)
        columns, counts, taken, targets, numbers = arrays_to_device(
            [joined.columns, joined.counts, np.flatnonzero(own), rank * size + places % size, blocks],
            self._device,
        )
        full = bool(own.all())

        @torch.inference_mode()
        def take(layer: int, attention: torch.Tensor) -> None:
            rows = attention.shape[1]
            found = attention.gather(2, columns[:, None].expand(-1, rows, -1))  # [windows, rows, places]
            self._finite.append(torch.isfinite(found).all())
            smooth = _smooth(found, None if full else counts)
            smooth = smooth.transpose(0, 1).flatten(1)  # [rows, windows * places]
            if not full:
                smooth = smooth.index_select(1, taken)
            tokens = smooth.new_zeros(rows, len(blocks) * size).index_copy_(1, targets, smooth)
            _spread(self._best_of(layer, attention), numbers, tokens.view(rows, -1, size))

        return take

    def _native_taker(self, joined: Joined, native: QuestionKernel) -> Take:
        size = self._task.block_size
        places = Places.of(joined.columns, joined.places, joined.counts, size, int(_EDGE * size))

        def take(layer: int, attention: torch.Tensor) -> None:
            finite = native.raise_blocks(self._best_of(layer, attention), attention, places, _SOFTER)
            self._finite.append(torch.tensor(finite))

        return take

    def _best_of(self, layer: int, attention: torch.Tensor) -> torch.Tensor:
        """The best of each row of a layer so far. [rows, blocks]"""
        if layer not in self._best:
            self._best[layer] = attention.new_zeros(attention.shape[1], self._task.blocks)
        return self._best[layer]

    def result(self, reduce: Reduce) -> Generator[None, None, np.ndarray]:
        """The reduced attention to the task's `context_blocks`. Yields until the device has computed it."""
        with torch.inference_mode():
            [read] = arrays_to_device([self._task.context_blocks], self._device)
            rows = {layer: best.index_select(1, read).float() for layer, best in sorted(self._best.items())}
            found, finite = to_host([reduce(rows), torch.stack(self._finite).all()])
        yield from handing_over(until_computed(self._device), self._task)
        check_finite(bool(finite))
        return found.numpy()  # type: ignore[no-any-return]


def _smooth(attention: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """The mean of each place and its neighbours on either side; 0 for padding.

    attention: [windows, heads, places], counts: [windows] or None without padding
    """
    if counts is None:
        return _neighbours(attention) / _neighbours(attention.new_ones(1, 1, attention.shape[2]))
    beyond = (
        torch.arange(attention.shape[2], device=attention.device) >= counts[:, None, None]
    )  # [windows, 1, places]
    sums = _neighbours(attention.masked_fill(beyond, 0.0)) / _neighbours((~beyond).float()).clamp_min(1.0)
    return sums.masked_fill(beyond, 0.0)


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """The sum of each value and its neighbours."""
    side = _SMOOTH // 2
    if values.is_cuda:
        return F.avg_pool2d(values[:, :, None], (1, _SMOOTH), 1, (0, side), divisor_override=1)[:, :, 0]
    padded = F.pad(values, (side, side))  # a CPU adds five times as fast as it pools
    count = values.shape[2]
    total = padded[:, :, :count] + padded[:, :, 1 : count + 1]
    for shift in range(2, _SMOOTH):
        total += padded[:, :, shift : shift + count]
    return total


def _spread(best: torch.Tensor, blocks: torch.Tensor, attention: torch.Tensor) -> None:
    """Raise each block's best to the attention of its tokens and, weighted down, of tokens near its edges.

    best: [rows, all blocks], blocks: [some], attention: [rows, some blocks, tokens]
    """
    edge = int(_EDGE * attention.shape[2])
    parts = [(0, attention.amax(dim=2))]
    if edge:
        parts.append((-1, _SOFTER * attention[:, :, :edge].amax(dim=2)))
        parts.append((1, _SOFTER * attention[:, :, -edge:].amax(dim=2)))
    for shift, found in parts:
        target = (blocks + shift).clamp(0, best.shape[1] - 1)
        best.scatter_reduce_(1, target.expand_as(found), found, "amax")
