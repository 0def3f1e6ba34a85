"""Combines scores of different kinds into one: the relative odds that a block holds evidence.

Attention, shared words and similar words have different scales and shapes. Each is standardised over the
blocks that it scored, so that it counts by how far a block stands out. Their weighted sum is a logarithm:
calibration fits the weights so that its exponential is the chance of a block, up to a factor. Shares of the
result are therefore probabilities, and a budget may stop where enough of them is kept.
"""

from __future__ import annotations

import numpy as np

ATTENTION = 2.0  # weight of heads that were not calibrated
WORDS = (0.12, 0.24)  # weights of shared and of similar words
UNCALIBRATED = (4 * WORDS[0], 4 * WORDS[1])  # beside heads that were not calibrated, which find little
_LEAST = 1e-6  # attention below this counts as none
_MOST = 60.0  # logarithms further below the best are alike


def standardised(values: np.ndarray) -> np.ndarray:
    """Deviations from the mean in units of the spread, along the last axis. All 0 without a spread."""
    if not values.shape[-1]:
        return values
    spread = values.std(axis=-1, keepdims=True)
    found: np.ndarray = (values - values.mean(axis=-1, keepdims=True)) / np.where(
        spread > 1e-9, spread, np.inf
    )
    return found


def log_attention(heads: np.ndarray) -> np.ndarray:
    """Each head's log attention, standardised over the blocks. [heads, blocks]"""
    return standardised(np.log(heads + _LEAST))


def outstanding(values: np.ndarray) -> np.ndarray:
    """Standardised values of at least 0: words that a block lacks say nothing against it."""
    found: np.ndarray = np.maximum(standardised(values), 0.0)
    return found


def word_logits(shared: np.ndarray, alike: np.ndarray, weights: tuple[float, float] = WORDS) -> np.ndarray:
    """The part of the sum that scores of shared and similar words give to each block."""
    return weights[0] * outstanding(shared) + weights[1] * outstanding(alike)


def odds(logits: np.ndarray) -> np.ndarray:
    """Positive numbers with these logarithms, the largest being 1."""
    if not len(logits):
        return logits
    found: np.ndarray = np.exp(np.maximum(logits - logits.max(), -_MOST))
    return found
