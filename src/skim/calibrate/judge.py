"""Judges weights on trials: the rank of the evidence among the blocks, by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skim.calibrate.capture import Trial


def judge(
    trials: Sequence[Trial], weights: Sequence[float], words: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """By kind: `kept`, all passages in the best tenth of blocks; `first`, they came first; `bits` of rank."""
    figures: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(trial.kind for trial in trials):
        own = [trial for trial in trials if trial.kind == kind]
        ranks = np.array([rank_of(trial, logits_of(trial, weights, words)) for trial in own])
        tenths = np.array([max(1, trial.words.shape[1] // 10) for trial in own])
        passages = np.array([len(trial.evidence) for trial in own])
        figures[kind] = {
            "kept": round(float((ranks < tenths).mean()), 3),
            "first": round(float((ranks < passages).mean()), 3),
            "bits": round(float(np.log2(1 + ranks).mean()), 3),
            "trials": len(own),
        }
    return figures


def logits_of(trial: Trial, weights: Sequence[float], words: tuple[float, float]) -> np.ndarray:
    """The weighted sum of features and words. [blocks]"""
    found: np.ndarray = np.array(weights) @ trial.features + np.array(words) @ trial.words
    return found


def rank_of(trial: Trial, logits: np.ndarray) -> int:
    """Number of blocks above the worst passage, whose score is that of its best block."""
    worst = min(float(logits[list(blocks)].max()) for blocks in trial.evidence)
    return int((logits > worst).sum())
