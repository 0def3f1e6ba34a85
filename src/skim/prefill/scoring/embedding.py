"""Scores blocks by similar words: cosines of token embeddings, without a forward.

The lexical scorer matches equal words, this one similar words: a question about a bill finds the invoice. It
takes milliseconds, so it narrows a long prompt for a scorer that runs a model (see `blend`).
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from skim.device import arrays_to_device, to_host, until_computed
from skim.prefill.scoring.scorer import ScoringError, ScoringTask, handing_over

_ROWS = 8192  # embeddings compared at once
_MEASURED = 2048  # embeddings whose lengths are measured at once
_ASKED = 64  # question tokens that are compared with the whole vocabulary at once
_SLICE = 2048  # tokens whose matches are looked up at once
_SLICES = 8  # between two yields
_HOST_TOKENS = 1 << 19  # prompt tokens that the host prepares between two yields
_TOKENS = 64  # question tokens whose matches are weighed at once
_MATCHES = 1 << 25  # matches looked up at once on a GPU
_SAMPLE = 8192  # embeddings that the common direction is estimated from
_FLOOR = 0.02  # smallest spread of similarities that counts as a difference
_POWER = 3  # weighs one strong match above several weak ones


class EmbeddingScorer:
    """The best match of every question token in each block, as its deviation from the mean over blocks.

    Embeddings are compared by cosine, after removing their mean and first principal direction. That
    direction separates frequent tokens from rare ones, and would make all rare ones alike.
    """

    @torch.inference_mode()
    def __init__(self, module: Any) -> None:
        self._module = module
        count = int(self._embedding().num_embeddings)
        sample = self._rows(torch.arange(0, count, max(1, count // _SAMPLE), device=module.device))
        self._mean = sample.mean(dim=0)
        self._common = _strongest_direction(sample.sub_(self._mean))

    def _embedding(self) -> Any:
        """Read from the module each time, since a module may be moved."""
        return self._module.get_input_embeddings()

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings as float32. A quantized table restores rows, and has no `weight`. [tokens, dim]"""
        embedding = self._embedding()
        weight = getattr(embedding, "weight", None)
        rows = embedding.table_rows(tokens) if weight is None else weight.index_select(0, tokens)
        return rows.float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _directions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors for these tokens. [tokens, dim]"""
        mean, common = self._mean.to(tokens.device), self._common.to(tokens.device)
        rows = self._rows(tokens) - mean
        rows = rows - (rows @ common)[:, None] * common
        lengths: torch.Tensor = rows.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return rows / lengths

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        scores = np.zeros(task.blocks)
        question_ids = np.unique(task.question_ids)
        blocks = task.context_blocks
        if not len(question_ids) or not len(blocks):
            return scores.tolist()  # type: ignore[no-any-return]
        table = getattr(self._embedding(), "weight", None)
        whole = table is not None and table.is_cuda
        find = self._by_vocabulary if whole else self._by_unique_token
        matches = yield from find(question_ids, task, blocks)
        total = matches.new_zeros(len(blocks))
        for some in torch.split(matches, _TOKENS):
            spread = some.std(dim=1, keepdim=True, correction=0).clamp_min(_FLOOR)
            above = ((some - some.mean(dim=1, keepdim=True)) / spread).clamp_min(0.0)
            total += above.pow(_POWER).sum(dim=0)
            yield
        [found] = to_host([total])
        yield from handing_over(until_computed(total.device), task)
        scores[blocks] = found.numpy()
        if not np.isfinite(scores).all():
            raise ScoringError("the model's embeddings are not finite; its weights are damaged")
        return scores.tolist()  # type: ignore[no-any-return]

    def _by_unique_token(
        self, question_ids: np.ndarray, task: ScoringTask, blocks: np.ndarray
    ) -> Generator[None, None, torch.Tensor]:
        """The best match of each question token in each of these blocks. Equal tokens are compared once.

        [question, blocks]
        """
        unique, rank = yield from _unique(task.ids)
        ours, theirs = arrays_to_device([question_ids, unique], self._module.device)
        question = self._directions(ours)
        parts: list[torch.Tensor] = []
        for first in range(0, len(unique), _ROWS):
            parts.append(question @ self._directions(theirs[first : first + _ROWS]).T)
            yield
        similar = torch.cat(parts, dim=1)  # [question, unique]
        best: list[torch.Tensor] = []  # each [question, some blocks]
        step = max(1, _SLICE // task.block_size)
        for done, first in enumerate(range(0, len(blocks), step), start=1):
            index = rank[task.ids[_places(task, blocks[first : first + step])]]
            [here] = arrays_to_device([index], similar.device)
            best.append(similar.index_select(1, here.flatten()).view(-1, *here.shape).amax(dim=2))
            if done % _SLICES == 0:
                yield
        return torch.cat(best, dim=1)

    @torch.inference_mode()
    def _by_vocabulary(
        self, question_ids: np.ndarray, task: ScoringTask, blocks: np.ndarray
    ) -> Generator[None, None, torch.Tensor]:
        """The same, comparing the whole vocabulary: a GPU does that faster than the host finds unique tokens.

        Question directions have no part along the common direction, so the others may keep theirs.
        """
        table = self._embedding().weight
        [ours] = arrays_to_device([question_ids], table.device)
        question = self._directions(ours)
        similar = question.new_empty(len(question), len(table))
        for some, into in zip(torch.split(question, _ASKED), torch.split(similar, _ASKED), strict=True):
            into.copy_(_products(some, table))
        similar.sub_((question @ self._mean.to(table.device))[:, None]).div_(self._lengths.to(table.device))
        yield
        step = max(1, min(_MATCHES // len(question_ids), _HOST_TOKENS) // task.block_size)
        best: list[torch.Tensor] = []
        for first in range(0, len(blocks), step):
            tokens = task.ids[_places(task, blocks[first : first + step])]
            [here] = arrays_to_device([tokens], table.device)
            best.append(similar.index_select(1, here.flatten()).view(-1, *here.shape).amax(dim=2))
            yield
        return torch.cat(best, dim=1)

    @cached_property
    @torch.inference_mode()
    def _lengths(self) -> torch.Tensor:
        """The lengths that `_directions` divides by. [vocabulary]"""
        table = self._embedding().weight
        mean, common = self._mean.to(table.device), self._common.to(table.device)
        parts = []
        for some in torch.split(table, _MEASURED):
            rows = some.float().sub_(mean)
            parts.append((rows - (rows @ common)[:, None] * common).norm(dim=1))
        return torch.cat(parts).clamp_min(1e-6)


def _products(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The products of float32 `rows` with every row of `table`, as float32. [rows, table]

    A table in half precision is not converted, which would write it twice over. Instead, each row is the sum
    of two rows of the table's dtype: their products are exact, and are added in float32.
    """
    if table.dtype == torch.float32:
        return rows @ table.T
    coarse = rows.to(table.dtype)
    fine = (rows - coarse.float()).to(table.dtype)
    both = torch.mm(torch.cat([coarse, fine]), table.T, out_dtype=torch.float32)
    return both[: len(rows)] + both[len(rows) :]


def _places(task: ScoringTask, blocks: np.ndarray) -> np.ndarray:
    """Indices of the tokens outside the question in these blocks, which have some. [blocks, block_size]

    A block with fewer tokens repeats its first: a repeated token does not change the best match.
    """
    places = blocks[:, None] * task.block_size + np.arange(task.block_size)
    own = places < len(task.tokens)
    own[own] = ~task.is_question[places[own]]
    first = np.take_along_axis(places, own.argmax(axis=1)[:, None], axis=1)
    found: np.ndarray = np.where(own, places, first)
    return found


def _unique(ids: np.ndarray) -> Generator[None, None, tuple[np.ndarray, np.ndarray]]:
    """The unique tokens, ascending, and the rank of each token id among them."""
    there = np.zeros(int(ids.max()) + 1, dtype=bool)
    for first in range(0, len(ids), _HOST_TOKENS):
        there[ids[first : first + _HOST_TOKENS]] = True
        yield
    return np.flatnonzero(there), np.cumsum(there) - 1


def _strongest_direction(rows: torch.Tensor) -> torch.Tensor:
    """The first principal direction of centred rows, by power iteration from a fixed start. [dim]"""
    direction = torch.ones(rows.shape[1], device=rows.device)
    for _ in range(30):
        direction = rows.T @ (rows @ direction)
        direction = direction / direction.norm().clamp_min(1e-12)
    return direction
