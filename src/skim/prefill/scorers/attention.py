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

from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from skim.prefill.calibration import Calibration
from skim.prefill.scorers import ScoringTask
from skim.prefill.windows import ScoringError, Window, cut, listen

WINDOW = 512
_SMOOTH = 5  # tokens averaged before the best of a block is taken
_EDGE = 0.25  # of a block's tokens, at either edge, that its neighbour hears too
_SOFTER = 0.75  # what they count there
_CUDA_TOKENS = 32768  # in one forward; on the CPU a window at a time, so that decode steps can come between


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
        if self._calibrated or not scores.any():
            return scores.mean(dim=0).tolist()  # type: ignore[no-any-return]
        read = sorted({place // task.block_size for place in context_places(task)})
        result = torch.zeros(task.blocks)
        result[read] = _standing_out(scores[:, read]).cpu()
        return result.tolist()  # type: ignore[no-any-return]

    def score_heads(self, task: ScoringTask) -> Generator[None, None, torch.Tensor]:
        """The scores of each head by itself, layers in ascending order. [heads, blocks]"""
        asking = tuple(task.tokens[task.question.start : task.question.stop])
        size = self._context_size(len(asking))
        places = context_places(task)
        best: torch.Tensor | None = None  # [heads, blocks]
        per_batch = self._per_batch or self._default_batch(size + len(asking))
        for pieces in cut(places, size, per_batch):
            contexts = [_join(piece, task.tokens) for piece in pieces]
            windows = [Window((*context, *asking), 1, len(asking)) for context, _ in contexts]
            for piece, (_, columns), heard in zip(
                pieces, contexts, listen(self._module, windows, self._heads), strict=True
            ):
                if best is None:
                    best = heard.new_zeros(heard.shape[0], task.blocks)
                own = heard[:, torch.tensor(columns, device=heard.device)]
                smooth = F.avg_pool1d(own, _SMOOTH, 1, _SMOOTH // 2, count_include_pad=False)
                _spread(best, torch.tensor(piece, device=heard.device), smooth, task.block_size)
            yield
        if best is None:
            return torch.zeros(1, task.blocks)
        read = torch.zeros(task.blocks, dtype=torch.bool)
        read[[place // task.block_size for place in places]] = True
        return best.masked_fill(~read.to(best.device), 0.0)

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

    def _default_batch(self, length: int) -> int:
        return max(1, _CUDA_TOKENS // length) if self._module.device.type == "cuda" else 1


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


def _join(places: Sequence[int], prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens at these places, and where among them, the first not counted, each one went.

    The prompt's first token stands before them and again wherever some are left out: models rest their
    attention on what stands first, and take the start of a torn sentence for less telling behind it.
    """
    tokens: list[int] = []
    columns: list[int] = []
    before = -2
    for place in places:
        if place != before + 1:
            tokens.append(prompt[0])
        columns.append(len(tokens) - 1)
        tokens.append(prompt[place])
        before = place
    return tokens, columns


def context_places(task: ScoringTask) -> list[int]:
    """The tokens of the candidate blocks, in order, without the question's."""
    blocks = range(task.blocks) if task.candidates is None else sorted(set(task.candidates))
    return [
        place
        for block in blocks
        for place in range(block * task.block_size, min((block + 1) * task.block_size, len(task.tokens)))
        if place not in task.question
    ]
