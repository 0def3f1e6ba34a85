"""Fits weights of features to the likelihood of the evidence, with a penalty on their size.

The blocks of a prompt share one unit of probability: the softmax of the weighted sum of features. The loss is
minus the log of the evidence's share. An L1 penalty makes most weights 0. Its strength is chosen by
cross-validation over pairs: no fact is fitted and validated together.

Weights may be negative: a head that attends to anything but evidence says where none is. Scores that are
given beside the features, such as those of words, are penalised for the distance of their weights from prior
ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skim.calibrate.capture import Trial
from skim.prefill.pairs import Kind
from skim.prefill.scoring.combine import WORDS

PENALTIES = (0.03, 0.01, 0.003, 0.001)
FOLDS = 5
STEPS = 300
LEAST = 0.01  # smaller weights are dropped
EMPHASIS = {Kind.FAR: 2.0}  # weight of a kind beside others: the hardest counts most
_RATE = 0.03
_START = 0.15  # roots of all weights at first


@dataclass(frozen=True)
class Data:
    """All trials, padded to the same number of blocks. A row is a passage of evidence."""

    features: torch.Tensor  # [features, trials * blocks]; the given scores are the last ones
    base: torch.Tensor  # [trials, blocks]: given scores with their prior weights; -inf for padding
    trial: torch.Tensor  # [rows]
    own: torch.Tensor  # [rows, blocks]: True for the passage's blocks
    hidden: torch.Tensor  # [rows, blocks]: True for the blocks of the prompt's other passages
    weight: torch.Tensor  # [rows]: kinds count by `EMPHASIS`, whatever their number of rows
    pair: tuple[str, ...]  # of each row

    @classmethod
    def of(cls, trials: Sequence[Trial], device: torch.device, prior: Sequence[float] = WORDS) -> Data:
        most = max(trial.columns for trial in trials)
        count = len(trials[0].features) + len(prior)
        features = torch.zeros(count, len(trials), most)
        base = torch.full((len(trials), most), float("-inf"))
        rows: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for index, trial in enumerate(trials):
            blocks = trial.columns
            features[: -len(prior), index, :blocks] = torch.from_numpy(trial.features)
            features[-len(prior) :, index, :blocks] = torch.from_numpy(trial.given)
            base[index, :blocks] = torch.from_numpy(np.array(prior, dtype=np.float32) @ trial.given)
            if trial.stands_for is not None:
                base[index, :blocks] += torch.from_numpy(np.log(trial.stands_for).astype(np.float32))
            masks = torch.zeros(len(trial.evidence), most, dtype=torch.bool)
            for mask, own in zip(masks, trial.evidence, strict=True):
                mask[list(own)] = True
            rows += [(index, mask, masks.any(dim=0) & ~mask) for mask in masks if mask.any()]
        kinds = [trials[index].kind for index, _, _ in rows]
        weight = torch.tensor([EMPHASIS.get(kind, 1.0) / kinds.count(kind) for kind in kinds])  # type: ignore[call-overload]
        return cls(
            features.flatten(1).to(device),
            base.to(device),
            torch.tensor([index for index, _, _ in rows], device=device),
            torch.stack([own for _, own, _ in rows]).to(device),
            torch.stack([hidden for _, _, hidden in rows]).to(device),
            weight.to(device),
            tuple(trials[index].pair for index, _, _ in rows),
        )


@dataclass(frozen=True)
class Fitted:
    """Weights that were fitted to trials."""

    weights: list[float]  # of the features, 0 for those that are dropped
    given: tuple[float, ...]  # of the given scores
    loss: float  # on the pairs that were left out in turn
    before: float  # the same without features, with the prior weights of the given scores
    penalty: float
    folds: np.ndarray  # [folds, features and given scores]: weights fitted without the pairs of a fold
    fold_of: dict[str, int]  # by pair

    def unseen_logits(self, trial: Trial) -> np.ndarray:
        """The trial's logits by weights that were fitted without its pair. [columns]"""
        weights = self.folds[self.fold_of.get(trial.pair, 0)]
        found: np.ndarray = weights @ np.concatenate([trial.features, trial.given])
        return found


def fit(
    trials: Sequence[Trial], device: torch.device, seed: int = 0, prior: Sequence[float] = WORDS
) -> Fitted:
    """Fit the weights of features and of given scores. The latter are drawn towards `prior`."""
    data = Data.of(trials, device, prior)
    fold_of = _folds(data.pair, seed)
    count = max(fold_of.values()) + 1
    number = torch.tensor([fold_of[pair] for pair in data.pair], device=device)
    tested = torch.stack([(number == fold).float() for fold in range(count)] * len(PENALTIES))
    found = minimise(data, 1.0 - tested, _each(PENALTIES, count, device))
    tested *= data.weight
    loss = surprise(data, found)  # [penalties * folds, rows]
    validated = ((loss * tested).sum(dim=1) / tested.sum(dim=1)).view(len(PENALTIES), -1).mean(dim=1)
    best = int(validated.argmin())
    plain = surprise(data, torch.zeros(1, len(data.features), device=device))  # [1, rows]
    before = ((plain * tested).sum(dim=1) / tested.sum(dim=1)).mean()
    everything = torch.ones(1, len(data.pair), device=device)
    [weights] = minimise(data, everything, _each((PENALTIES[best],), 1, device)).tolist()
    heads = [round(weight, 3) for weight in weights[: -len(prior)]]
    largest = max(map(abs, heads))
    folds = found.view(len(PENALTIES), count, -1)[best].cpu().numpy()
    folds[:, -len(prior) :] += np.array(prior, dtype=np.float32)
    return Fitted(
        weights=[weight if abs(weight) >= min(LEAST, largest) else 0.0 for weight in heads],
        given=tuple(round(own + more, 3) for own, more in zip(prior, weights[-len(prior) :], strict=True)),
        loss=float(validated[best]),
        before=float(before),
        penalty=PENALTIES[best],
        folds=folds,
        fold_of=fold_of,
    )


def surprise(data: Data, weights: torch.Tensor) -> torch.Tensor:
    """Minus the log of each passage's share of the probability. [sets, features] -> [sets, rows]"""
    logits = (weights @ data.features).view(len(weights), *data.base.shape) + data.base
    logits = logits[:, data.trial].masked_fill(data.hidden, float("-inf"))
    own = logits.masked_fill(~data.own, float("-inf"))
    return logits.logsumexp(dim=2) - own.logsumexp(dim=2)


def minimise(data: Data, use: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """The weights with the least penalised loss; several fits at once. [sets, features]

    use: [sets, rows], 1 for rows to fit to; penalty: [sets]

    A weight is the difference of two squares, so that the squares of its roots are an L1 penalty.
    """
    roots = torch.full((2, len(use), len(data.features)), _START, device=use.device, requires_grad=True)
    share = use * data.weight
    share = share / share.sum(dim=1, keepdim=True)
    optimizer = torch.optim.Adam([roots], lr=_RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, 3 * (1 - step / STEPS))
        squares = roots.square()
        loss = (surprise(data, squares[0] - squares[1]) * share).sum(dim=1)
        optimizer.zero_grad()
        (loss + penalty * squares.sum(dim=(0, 2))).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    squares = roots.detach().square()
    return squares[0] - squares[1]


def _folds(pairs: Sequence[str], seed: int) -> dict[str, int]:
    """The fold of each pair. No fold is empty."""
    names = sorted(set(pairs))
    random.Random(seed).shuffle(names)
    return {pair: index % min(FOLDS, len(names)) for index, pair in enumerate(names)}


def _each(values: Sequence[float], times: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value for value in values for _ in range(times)], device=device)
