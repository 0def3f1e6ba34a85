"""Fits the second look to blocks that the first one ranks high, and judges it on facts left out in turn.

The first look's logits come from weights that were fitted without the prompt's fact. So the second look
learns how far to trust them where the fact is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skim.calibrate.capture import Trial
from skim.calibrate.fit import Fitted, fit
from skim.calibrate.judge import rank_of
from skim.prefill.scoring.calibration import Second
from skim.prefill.scoring.features import Feature, Name

WINDOW = 128  # prompt tokens of a scoring window: four blocks compete for the question's attention
PRIOR = (1.0, 0.0, 0.0, 0.0)
"""Of the first look's logit, of shared and similar words, which that contains, and of the likelihood."""
LEAST_PROMPTS = 20  # that must be read twice
ENOUGH = 24  # blocks that 1,000 tokens hold beside pinned ones


@dataclass(frozen=True)
class Twice:
    """A prompt that was read twice."""

    first: Trial
    logits: np.ndarray  # [columns of `first`], by weights that were fitted without the prompt's fact
    second: Trial


def fit_second(read: Sequence[Twice], device: torch.device, seed: int = 0) -> Fitted | None:
    """Fit the second look. None if there are too few prompts, or if new facts become no likelier by it."""
    usable = [one.second for one in read if any(one.second.evidence)]
    if len(usable) < LEAST_PROMPTS:
        return None
    found = fit(usable, device, seed, PRIOR)
    return found if any(found.weights) and found.loss < found.before else None


def second_of(names: Sequence[Name], fitted: Fitted) -> Second:
    first, shared, similar, likelihood = fitted.given
    return Second(features_of(names, fitted.weights), first, (shared, similar), WINDOW, likelihood)


def features_of(names: Sequence[Name], weights: Sequence[float]) -> tuple[Feature, ...]:
    """The features whose weights are not 0."""
    return tuple(Feature(*name, weight) for name, weight in zip(names, weights, strict=True) if weight)


def judge_looks(read: Sequence[Twice], fitted: Fitted) -> dict[str, dict[str, float]]:
    """By kind: the share of prompts with all evidence in the best blocks, after one look and after both.

    All ranks are by weights that were fitted without the prompt's fact. `long` is the number of prompts.
    """
    figures: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(one.first.kind for one in read):
        own = [one for one in read if one.first.kind == kind]
        once = [rank_of(one.first, one.logits) < ENOUGH for one in own]
        both = [rank_of(one.second, fitted.unseen_logits(one.second)) < ENOUGH for one in own]
        figures[kind] = {
            "once": round(float(np.mean(once)), 3),
            "twice": round(float(np.mean(both)), 3),
            "long": len(own),
        }
    return figures
