"""Turns the question's attention to tokens, in scoring windows, into scores of prompt blocks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from skim.device import arrays_to_device, to_host, until_computed
from skim.prefill.scoring.scorer import ScoringTask, handing_over
from skim.prefill.scoring.windows import Batch, check_finite

_SMOOTH = 5  # tokens averaged before a block's maximum is taken
_EDGE = 0.25  # share of a block's tokens, at either edge, that also count for its neighbour
_SOFTER = 0.75  # their weight there


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
    """The best smoothed attention of each block, head by head, over all scoring windows."""

    def __init__(self, task: ScoringTask) -> None:
        self._task = task
        self._best: torch.Tensor | None = None  # [heads, blocks]
        self._finite: list[torch.Tensor] = []

    @torch.inference_mode()
    def add(self, joined: Joined, attention: torch.Tensor) -> None:
        """attention: [windows, heads, length]"""
        columns, places, counts = arrays_to_device(
            [joined.columns, joined.places, joined.counts], attention.device
        )
        heads = attention.shape[1]
        own = attention.gather(2, columns[:, None].expand(-1, heads, -1))  # [windows, heads, places]
        smooth = _smooth(own, counts)
        if self._best is None:
            self._best = attention.new_zeros(heads, self._task.blocks)
        _spread(self._best, places.flatten(), smooth.transpose(0, 1).flatten(1), self._task.block_size)
        self._finite.append(torch.isfinite(own).all())

    def result(self) -> Generator[None, None, np.ndarray]:
        """0 for blocks that are not scored. Yields until the device has computed them. [heads, blocks]"""
        assert self._best is not None
        unread = np.ones(self._task.blocks, dtype=np.int64)
        unread[self._task.context_blocks] = 0
        [hidden] = arrays_to_device([unread], self._best.device)
        found, finite = to_host(
            [self._best.masked_fill(hidden.bool(), 0.0).float(), torch.stack(self._finite).all()]
        )
        yield from handing_over(until_computed(self._best.device), self._task)
        check_finite(bool(finite))
        return found.numpy()  # type: ignore[no-any-return]


def _smooth(attention: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean of each place and its neighbours on either side; 0 for padding.

    attention: [windows, heads, places], counts: [windows]
    """
    beyond = (
        torch.arange(attention.shape[2], device=attention.device) >= counts[:, None, None]
    )  # [windows, 1, places]
    sums = _neighbours(attention.masked_fill(beyond, 0.0)) / _neighbours((~beyond).float()).clamp_min(1.0)
    return sums.masked_fill(beyond, 0.0)


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """The sum of each value and its neighbours."""
    pad = (0, _SMOOTH // 2)
    return F.avg_pool2d(values[:, :, None], (1, _SMOOTH), 1, pad, divisor_override=1)[:, :, 0]


def _spread(best: torch.Tensor, places: torch.Tensor, attention: torch.Tensor, block_size: int) -> None:
    """Raise each block's best to the attention of its tokens and, weighted down, of tokens near its edges.

    best: [heads, blocks], places: [tokens], attention: [heads, tokens]
    """
    edge = int(_EDGE * block_size)
    for shift, weight in ((0, 1.0), (-edge, _SOFTER), (edge, _SOFTER)):
        blocks = ((places + shift) // block_size).clamp(0, best.shape[1] - 1)
        best.scatter_reduce_(1, blocks.expand_as(attention), weight * attention, "amax")
