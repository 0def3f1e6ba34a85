"""Scores by words that are near in meaning: the drafter's token embeddings, and no forward at all.

What the lexical scorer does with equal words, this one does with similar ones: a question about a bill finds
the invoice. It costs milliseconds, so it narrows a long prompt for a scorer that reads (see `cascade`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from skim.prefill.scorers import ScoringTask
from skim.prefill.windows import ScoringError

_SLICE = 2048  # tokens compared at once
_SLICES = 8  # between two yields
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
    def _directions(self, tokens: list[int] | torch.Tensor) -> torch.Tensor:
        """Unit vectors for these tokens. [tokens, dim]"""
        table = self._table()
        mean, common = self._mean.to(table.device), self._common.to(table.device)
        rows = table[tokens].float() - mean
        rows = rows - (rows @ common)[:, None] * common
        lengths: torch.Tensor = rows.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return rows / lengths

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        scores = [0.0] * task.blocks
        asked = sorted(set(task.tokens[task.question.start : task.question.stop]))
        wanted = range(task.blocks) if task.candidates is None else sorted(set(task.candidates))
        blocks = [block for block in wanted if any(True for _ in _context(task, block))]
        if not asked or not blocks:
            return scores
        device = self._table().device
        question = self._directions(asked)
        best: list[torch.Tensor] = []  # each [asked, some blocks]
        step = max(1, _SLICE // task.block_size)
        for done, first in enumerate(range(0, len(blocks), step), start=1):
            some = [list(_context(task, block)) for block in blocks[first : first + step]]
            flat = torch.tensor([task.tokens[place] for places in some for place in places], device=device)
            owner = torch.tensor([i for i, places in enumerate(some) for _ in places], device=device)
            kinds, index = torch.unique(flat, return_inverse=True)
            similar = (question @ self._directions(kinds).T)[:, index]  # [asked, tokens]
            most = similar.new_full((len(asked), len(some)), -1.0)
            best.append(most.scatter_reduce_(1, owner.expand_as(similar), similar, "amax"))
            if done % _SLICES == 0:
                yield
        matches = torch.cat(best, dim=1)
        spread = matches.std(dim=1, keepdim=True, correction=0).clamp_min(_FLOOR)
        above = ((matches - matches.mean(dim=1, keepdim=True)) / spread).clamp_min(0.0)
        values = above.pow(_POWER).sum(dim=0)
        if not bool(torch.isfinite(values).all()):
            raise ScoringError("the drafter's embeddings are not finite; its weights are damaged")
        for block, value in zip(blocks, values.tolist(), strict=True):
            scores[block] = value
        return scores


def _context(task: ScoringTask, block: int) -> Generator[int, None, None]:
    """The tokens of a block that are not the question's."""
    start = block * task.block_size
    for place in range(start, min(start + task.block_size, len(task.tokens))):
        if place not in task.question:
            yield place


def _strongest_direction(rows: torch.Tensor) -> torch.Tensor:
    """The first principal direction of centred rows, by power iteration from a fixed start. [dim]"""
    direction = torch.ones(rows.shape[1], device=rows.device)
    for _ in range(30):
        direction = rows.T @ (rows @ direction)
        direction = direction / direction.norm().clamp_min(1e-12)
    return direction
