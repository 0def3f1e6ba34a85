"""Scores by what the question's tokens attend to, in windows, at a few heads that are known to retrieve.

What was measured (SmolLM2-135M, 7K tokens of natural text, 260 needle tasks) and is therefore so here:
- heads chosen by calibration, not an average over all: most heads attend to the start, to neighbours or to
  nothing in particular, and drown the few that retrieve;
- over the question's tokens the maximum, not the mean: one word of the question finds the passage, and the
  others have nothing to look for;
- probabilities of the full softmax, so that a window without the answer has low scores (see `WindowStep`);
- five neighbouring tokens averaged, then the best of a block: an answer is a few words, a lone spike is not;
- what is heard near the edge of a block counts, more softly, for its neighbour too: of the needles in 20
  prompts of 4K tokens a quarter lay across an edge, and the half without the question's words was lost.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from skim.device import arrays_to_device
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.task import ScoringTask
from skim.prefill.scoring.windows import (
    Batch,
    ScoringError,
    check_finite,
    cut,
    listen,
    windows_per_batch,
)

WINDOW = 512
_SMOOTH = 5  # tokens averaged before the best of a block is taken
_EDGE = 0.25  # of a block's tokens, at either edge, that its neighbour hears too
_SOFTER = 0.75  # what they count there


class AttentionScorer:
    """Attention from the question to the blocks, by a drafter or, under the name `self`, the target itself.

    `module` reads the prompt's token ids. Blocks that are candidates are read in order, `window` context
    tokens at a time, joined where others lie between them; memory does not grow with the prompt.
    """

    def __init__(
        self,
        module: Any,
        calibration: Calibration,
        *,
        name: str = "attention",
        window: int = WINDOW,
        windows_per_batch: int | None = None,
    ) -> None:
        config = module.config.get_text_config()
        calibration.check_fits(config.num_hidden_layers, config.num_attention_heads)
        self.name = name
        self._module = module
        self._heads = calibration.by_layer()
        self._calibrated = calibration.heads is not None
        self._window = window
        self._per_batch = windows_per_batch
        self._positions = int(config.max_position_embeddings)

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        scores = yield from self.score_heads(task)
        if self._calibrated:
            return scores.mean(dim=0).tolist()  # type: ignore[no-any-return]
        read = np.unique(task.places(question=False) // task.block_size)
        result = np.zeros(task.blocks)
        if len(read):
            result[read] = _standing_out(scores.cpu()[:, torch.from_numpy(read)]).numpy()
        return result.tolist()  # type: ignore[no-any-return]

    def score_heads(self, task: ScoringTask) -> Generator[None, None, torch.Tensor]:
        """The scores of each head by itself, layers in ascending order. [heads, blocks]

        On a GPU the host launches all of it and waits once, at the end.
        """
        question = task.ids[task.question.start : task.question.stop]
        size = self._context_size(len(question))
        places = task.places(question=False)
        if not len(places):
            return torch.zeros(1, task.blocks)
        per_batch = self._per_batch or windows_per_batch(
            self._module, max(self._heads) + 1, size + len(question) + 1
        )
        best = Best(task)
        for edges in cut(len(places), size, per_batch):
            joined = join(places, edges, task.ids, question)
            best.note(joined, listen(self._module, joined.batch, self._heads))
            yield
        return best.scores()

    def _context_size(self, asking: int) -> int:
        """Context tokens in a window: more for a long question, which every window has to read again.

        Never more than half of the model's positions: `_join` may have to put as many tokens between them.
        """
        size = min(max(self._window, 4 * asking), (self._positions - asking) // 2)
        if not 0 < asking <= self._window // 2 or size < 1:
            raise ScoringError(
                f"the question has {asking} tokens, and the {self.name} scorer reads questions of 1 to "
                f"{self._window // 2}, half a window of {self._window}, in {self._positions} positions; "
                "shorten the question or use the lexical scorer"
            )
        return size


class Best:
    """What was heard of each block, at each head where it was heard best."""

    def __init__(self, task: ScoringTask) -> None:
        self._task = task
        self._best: torch.Tensor | None = None  # [heads, blocks]
        self._finite: list[torch.Tensor] = []

    @torch.inference_mode()
    def note(self, joined: Joined, heard: torch.Tensor) -> None:
        """heard: [windows, heads, length]"""
        columns, places, counts = arrays_to_device(
            [joined.columns, joined.places, joined.counts], heard.device
        )
        own = heard.gather(2, columns[:, None].expand(-1, heard.shape[1], -1))  # [windows, heads, places]
        smooth = _smooth(own, counts)
        if self._best is None:
            self._best = heard.new_zeros(heard.shape[1], self._task.blocks)
        _spread(self._best, places.flatten(), smooth.transpose(0, 1).flatten(1), self._task.block_size)
        self._finite.append(torch.isfinite(own).all())

    def scores(self) -> torch.Tensor:
        """0 for blocks that are not scored. Here the host waits. [heads, blocks]"""
        assert self._best is not None
        unread = np.ones(self._task.blocks, dtype=np.int64)
        unread[self._task.places(question=False) // self._task.block_size] = 0
        [hidden] = arrays_to_device([unread], self._best.device)
        found = self._best.masked_fill(hidden.bool(), 0.0)
        check_finite(bool(torch.stack(self._finite).all()))
        return found


def _smooth(heard: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean of each place and its neighbours on either side. Places from a window's count on are 0.

    heard: [windows, heads, places], counts: [windows]
    """
    beyond = (
        torch.arange(heard.shape[2], device=heard.device) >= counts[:, None, None]
    )  # [windows, 1, places]
    sums = _neighbours(heard.masked_fill(beyond, 0.0)) / _neighbours((~beyond).float()).clamp_min(1.0)
    return sums.masked_fill(beyond, 0.0)


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """The sum of each value and its neighbours."""
    pad = (0, _SMOOTH // 2)
    return F.avg_pool2d(values[:, :, None], (1, _SMOOTH), 1, pad, divisor_override=1)[:, :, 0]


def _spread(best: torch.Tensor, places: torch.Tensor, heard: torch.Tensor, block_size: int) -> None:
    """Raise each block's best to what was heard in it, and, more softly, to what was heard close to it.

    best: [heads, blocks], places: [tokens], heard: [heads, tokens]
    """
    edge = int(_EDGE * block_size)
    for shift, weight in ((0, 1.0), (-edge, _SOFTER), (edge, _SOFTER)):
        blocks = ((places + shift) // block_size).clamp(0, best.shape[1] - 1)
        best.scatter_reduce_(1, blocks.expand_as(heard), weight * heard, "amax")


def _standing_out(scores: torch.Tensor) -> torch.Tensor:
    """For heads that nobody has tried: how far a block stands out, at the head where it does so most.

    A head that retrieves is quiet but for one block; the many that do not are never quiet, and would drown
    it in a mean. The least is 0. [heads, blocks] -> [blocks]
    """
    spread = scores.std(dim=1, keepdim=True, correction=0).clamp_min(1e-9)
    most = ((scores - scores.mean(dim=1, keepdim=True)) / spread).amax(dim=0)
    return most - most.min()


@dataclass(frozen=True)
class Joined:
    """Windows, and where in them the places of the prompt went."""

    batch: Batch
    columns: np.ndarray  # [windows, places]: where in its window each place stands
    places: np.ndarray  # [windows, places], in order
    counts: np.ndarray  # [windows]: how many places there are; what follows in a row means nothing


def join(places: np.ndarray, edges: np.ndarray, prompt: np.ndarray, question: np.ndarray) -> Joined:
    """Windows of the tokens at these places, cut at the edges, each with the question behind it.

    The prompt's first token stands before them and again wherever some are left out: models rest their
    attention on what stands first, and take the start of a torn sentence for less telling behind it.
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
