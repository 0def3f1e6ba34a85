"""Judges weights on trials: the rank of the evidence among the blocks, by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skim.calibrate.capture import Trial


def judge(
    trials: Sequence[Trial], weights: Sequence[float], given: Sequence[float]
) -> dict[str, dict[str, float]]:
    """By kind: `kept`, all passages in the best tenth of blocks; `first`, they came first; `bits` of rank."""
    figures: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(trial.kind for trial in trials):
        own = [trial for trial in trials if trial.kind == kind]
        ranks = np.array([rank_of(trial, logits_of(trial, weights, given)) for trial in own])
        tenths = np.array([max(1, trial.total // 10) for trial in own])
        passages = np.array([len(trial.evidence) for trial in own])
        figures[kind] = {
            "kept": round(float((ranks < tenths).mean()), 3),
            "first": round(float((ranks < passages).mean()), 3),
            "bits": round(float(np.log2(1 + ranks).mean()), 3),
            "trials": len(own),
        }
    return figures


def logits_of(trial: Trial, weights: Sequence[float], given: Sequence[float]) -> np.ndarray:
    """The weighted sum of features and given scores. [columns]"""
    found: np.ndarray = np.array(weights) @ trial.features + np.array(given) @ trial.given
    return found


def rank_of(trial: Trial, logits: np.ndarray) -> int:
    """Number of blocks above the worst passage, whose score is that of its best block.

    A passage without a column was not read: all blocks are above it.
    """
    if not all(trial.evidence):
        return trial.total
    worst = min(float(logits[list(blocks)].max()) for blocks in trial.evidence)
    above = logits > worst
    return int(above.sum() if trial.stands_for is None else round(float(trial.stands_for[above].sum())))
