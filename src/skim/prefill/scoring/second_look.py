"""The second look: the best blocks of a prompt are read again and ranked anew.

The first look ranks all blocks with half of the model's layers. Of thousands of blocks, dozens resemble
evidence, and the first look's weights, which had to tell evidence from any text, rank these by chance.
The second look reads few blocks, so it can afford all layers. It adds the likelihood of the question after
each block (`likelihood`) to attention in scoring windows that hold promising passages only, which compete for
the question's attention. Its weights are fitted to blocks that the first look ranks high.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from skim.prefill.scoring.calibration import Second
from skim.prefill.scoring.scorer import Scorer, ScoringTask

SHARE = 4  # of so many blocks, one is read again
LEAST = 48  # blocks to read again: in shorter prompts the first look ranks well enough
MOST = 384


def count_of(blocks: int) -> int:
    """Blocks that are read again, of so many; 0 for prompts that are too short to need it."""
    count = min(MOST, blocks // SHARE)
    return count if count >= LEAST else 0


def choose(logits: np.ndarray, count: int) -> np.ndarray:
    """`count` blocks to read again, ascending: the best ones, with neighbours that may continue them.

    Blocks that were not read have a logit of -inf and are not chosen.
    """
    known = np.isfinite(logits)
    best = np.argsort(-logits, kind="stable")[: min(count, int(known.sum()))]
    near = (best[:, None] + np.array([0, 1, -1])).reshape(-1)
    near = near[(near >= 0) & (near < len(logits))]
    near = near[known[near]]
    _, first = np.unique(near, return_index=True)
    return np.sort(near[np.sort(first)[:count]])


def divided_anew(logits: np.ndarray, chosen: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The logits, with the chance of the chosen blocks divided among them by their second logits.

    The other blocks keep their chances, so that shares of the whole stay probabilities.
    """
    found = logits.copy()
    found[chosen] = second + _log_sum(logits[chosen]) - _log_sum(second)
    return found


class SecondLook:
    """Ranks blocks that the first look ranks high, with weights of its own."""

    def __init__(self, attention: Scorer, likelihood: Scorer, weights: Second) -> None:
        self._attention = attention
        self._likelihood = likelihood
        self._weights = weights

    def is_worthwhile(self, blocks: int) -> bool:
        return count_of(blocks) > 0

    def rank(
        self, task: ScoringTask, logits: np.ndarray, words: tuple[np.ndarray, np.ndarray]
    ) -> Generator[None, None, None]:
        """Divide the chance of the best blocks anew, in place.

        logits: of all blocks, by the first look, -inf if not read; words: how far shared and similar words
        stand out in each block
        """
        weights = self._weights
        chosen = choose(logits, count_of(int(np.isfinite(logits).sum())))
        some = task.only(chosen.tolist())
        found = np.array((yield from self._attention.score(some)))
        asked = np.ones(task.blocks)
        if weights.likelihood:
            asked = np.array((yield from self._likelihood.score(some)))
        chosen = chosen[(found[chosen] > 0) & (asked[chosen] > 0)]
        if not len(chosen):
            return
        task.on_second_look(len(chosen))
        own = np.log(found[chosen]) + weights.likelihood * np.log(asked[chosen])
        beside = weights.words[0] * words[0] + weights.words[1] * words[1] + weights.first * logits
        logits[:] = divided_anew(logits, chosen, own + beside[chosen])


def _log_sum(values: np.ndarray) -> float:
    most = values.max()
    return float(most + np.log(np.exp(values - most).sum()))
