"""Scores by words that are near in meaning: the drafter's token embeddings, and no forward at all.

What the lexical scorer does with equal words, this one does with similar ones: a question about a bill finds
the invoice. It costs milliseconds, so it narrows a long prompt for a scorer that reads (see `cascade`).
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from skim.device import arrays_to_device
from skim.prefill.scoring.task import ScoringTask
from skim.prefill.scoring.windows import ScoringError

_ROWS = 8192  # embeddings compared at once
_SLICE = 2048  # tokens whose matches are looked up at once
_SLICES = 8  # between two yields
_MATCHES = 1 << 25  # matches looked up at once on a GPU
_SAMPLE = 8192  # embeddings that their common direction is estimated from
_FLOOR = 0.02  # least spread of similarities that is taken for a difference
_POWER = 3  # one word that stands out counts for more than several that hardly do


class EmbeddingScorer:
    """The best match of every question token in each block, by how far it stands out among the blocks.

    Embeddings are compared by their cosine, without their mean and their one strongest common direction:
    that tells frequent tokens from rare ones, and would make all rare ones alike.
    """

    name = "embedding"

    @torch.inference_mode()
    def __init__(self, module: Any) -> None:
        self._module = module
        table = self._table()
        sample = table[:: max(1, table.shape[0] // _SAMPLE)].float()
        self._mean = sample.mean(dim=0)
        self._common = _strongest_direction(sample - self._mean)

    def _table(self) -> torch.Tensor:
        """[vocabulary, dim]; asked for anew each time, since a module may be moved."""
        table: torch.Tensor = self._module.get_input_embeddings().weight
        return table

    @torch.inference_mode()
    def _directions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors for these tokens. [tokens, dim]"""
        table = self._table()
        mean, common = self._mean.to(table.device), self._common.to(table.device)
        rows = table.index_select(0, tokens).float() - mean
        rows = rows - (rows @ common)[:, None] * common
        lengths: torch.Tensor = rows.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return rows / lengths

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        scores = np.zeros(task.blocks)
        asked = np.unique(task.ids[task.question.start : task.question.stop])
        blocks, places = _places(task)
        if not len(asked) or not len(blocks):
            return scores.tolist()  # type: ignore[no-any-return]
        find = self._by_vocabulary if self._table().is_cuda else self._by_kind
        matches = yield from find(asked, task.ids[places])
        spread = matches.std(dim=1, keepdim=True, correction=0).clamp_min(_FLOOR)
        above = ((matches - matches.mean(dim=1, keepdim=True)) / spread).clamp_min(0.0)
        found = above.pow(_POWER).sum(dim=0)
        yield  # a GPU may still be at it
        scores[blocks] = found.cpu().numpy()
        if not np.isfinite(scores).all():
            raise ScoringError("the drafter's embeddings are not finite; its weights are damaged")
        return scores.tolist()  # type: ignore[no-any-return]

    def _by_kind(self, asked: np.ndarray, tokens: np.ndarray) -> Generator[None, None, torch.Tensor]:
        """The best match of each asked token in each row of tokens; equal ones are compared once.

        [blocks, block_size] -> [asked, blocks]
        """
        kinds, index = _kinds(tokens)
        ours, theirs = arrays_to_device([asked, kinds], self._table().device)
        question = self._directions(ours)
        parts: list[torch.Tensor] = []
        for first in range(0, len(kinds), _ROWS):
            parts.append(question @ self._directions(theirs[first : first + _ROWS]).T)
            yield
        similar = torch.cat(parts, dim=1)  # [asked, kinds]
        best: list[torch.Tensor] = []  # each [asked, some blocks]
        step = max(1, _SLICE // tokens.shape[1])
        for done, first in enumerate(range(0, len(tokens), step), start=1):
            [here] = arrays_to_device([index[first : first + step]], similar.device)
            best.append(similar.index_select(1, here.flatten()).view(-1, *here.shape).amax(dim=2))
            if done % _SLICES == 0:
                yield
        return torch.cat(best, dim=1)

    @torch.inference_mode()
    def _by_vocabulary(self, asked: np.ndarray, tokens: np.ndarray) -> Generator[None, None, torch.Tensor]:
        """The same with the whole vocabulary compared: a GPU does so before the host knows what is in it.

        What is asked has no part along the common direction, so what others have of it makes no difference.
        """
        table = self._table()
        ours, theirs = arrays_to_device([asked, tokens], table.device)
        question = self._directions(ours)
        similar = torch.cat([question @ rows.float().T for rows in torch.split(table, _ROWS)], dim=1)
        similar.sub_((question @ self._mean.to(table.device))[:, None]).div_(self._lengths.to(table.device))
        yield
        step = max(1, _MATCHES // (len(asked) * tokens.shape[1]))
        best: list[torch.Tensor] = []
        for here in torch.split(theirs, step):
            best.append(similar.index_select(1, here.flatten()).view(-1, *here.shape).amax(dim=2))
            yield
        return torch.cat(best, dim=1)

    @cached_property
    @torch.inference_mode()
    def _lengths(self) -> torch.Tensor:
        """Of what `_directions` makes unit vectors of. [vocabulary]"""
        table = self._table()
        mean, common = self._mean.to(table.device), self._common.to(table.device)
        parts = []
        for some in torch.split(table, _ROWS):
            rows = some.float() - mean
            parts.append((rows - (rows @ common)[:, None] * common).norm(dim=1))
        return torch.cat(parts).clamp_min(1e-6)


def _places(task: ScoringTask) -> tuple[np.ndarray, np.ndarray]:
    """The blocks with tokens that are not the question's, [blocks], and where they are, [blocks, block_size].

    One with fewer than others has its first one again: twice the same is no better a match than once.
    """
    places = task.wanted[:, None] * task.block_size + np.arange(task.block_size)
    own = (places < len(task.tokens)) & ((places < task.question.start) | (places >= task.question.stop))
    some = own.any(axis=1)
    places, own = places[some], own[some]
    first = np.take_along_axis(places, own.argmax(axis=1)[:, None], axis=1)
    return task.wanted[some], np.where(own, places, first)


def _kinds(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different tokens, ascending, and for each token which of them it is."""
    there = np.zeros(int(tokens.max()) + 1, dtype=bool)
    there[tokens] = True
    kinds = np.flatnonzero(there)
    rank = np.cumsum(there) - 1
    return kinds, rank[tokens]


def _strongest_direction(rows: torch.Tensor) -> torch.Tensor:
    """The first principal direction of centred rows, by power iteration from a fixed start. [dim]"""
    direction = torch.ones(rows.shape[1], device=rows.device)
    for _ in range(30):
        direction = rows.T @ (rows @ direction)
        direction = direction / direction.norm().clamp_min(1e-12)
    return direction
