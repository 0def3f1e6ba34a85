"""The second look: which blocks are read again, and how their chance is divided."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from skim.prefill.scoring import second_look
from skim.prefill.scoring.calibration import Second
from skim.prefill.scoring.combine import odds
from skim.prefill.scoring.features import Feature, Statistic
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion
from skim.prefill.scoring.second_look import LEAST, MOST, SHARE, SecondLook, choose, count_of, divided_anew


def plain_choice(logits: list[float], count: int) -> list[int]:
    """Reference: block by block, the best first, each with the one after it and the one before it."""
    known = [block for block, logit in enumerate(logits) if logit != -np.inf]
    found: list[int] = []
    for block in sorted(known, key=lambda block: -logits[block]):
        for near in (block, block + 1, block - 1):
            if near in known and near not in found and len(found) < count:
                found.append(near)
    return sorted(found)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_blocks_are_chosen_with_their_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 12, size=int(rng.integers(1, 60))).astype(float)
    logits[rng.random(len(logits)) < rng.choice([0.0, 0.3])] = -np.inf
    count = int(rng.integers(1, 70))
    assert choose(logits, count).tolist() == plain_choice(logits.tolist(), count)


def test_a_share_of_the_blocks_is_read_again_and_short_prompts_are_not() -> None:
    assert count_of(SHARE * LEAST - 1) == 0
    assert count_of(SHARE * LEAST) == LEAST
    assert count_of(1 << 18) == MOST


@pytest.mark.parametrize("seed", range(10))
def test_the_chosen_blocks_keep_their_chance_together_and_the_others_each_their_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=50)
    chosen = np.sort(rng.permutation(50)[:12])
    second = rng.normal(scale=20, size=12)
    before, after = np.exp(logits), np.exp(divided_anew(logits, chosen, second))
    others = np.setdiff1d(np.arange(50), chosen)
    assert np.array_equal(before[others], after[others])
    assert after[chosen].sum() == pytest.approx(before[chosen].sum())
    assert after[chosen] / after[chosen].sum() == pytest.approx(np.exp(second) / np.exp(second).sum())


class Fixed:
    """A scorer with a given logit for each block."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits
        self.asked: list[int] = []

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        self.asked = task.wanted.tolist()
        found = np.zeros(task.blocks)
        found[self.asked] = odds(self.logits[self.asked])
        yield
        return found.tolist()  # type: ignore[no-any-return]


def test_features_first_logits_and_words_count_by_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    rng = np.random.default_rng(0)
    task = ScoringTask(tuple(range(64)), (range(60, 64),), 1)
    first, own, shared, alike = rng.normal(size=(4, 64))
    scorer = Fixed(own)
    look = SecondLook(scorer, Second((Feature(Statistic.MAX, 0, 0, 1.0),), 0.5, (2.0, -3.0), 512))
    assert look.is_worthwhile(64)
    assert not look.is_worthwhile(31)
    logits = first.copy()
    run_to_completion(look.rank(task, logits, (shared, alike)))
    chosen = choose(first, 8)
    assert scorer.asked == chosen.tolist()
    expected = (own + 0.5 * first + 2 * shared - 3 * alike)[chosen]
    assert logits[chosen] - logits[chosen].max() == pytest.approx(expected - expected.max())
    assert np.array_equal(np.delete(logits, chosen), np.delete(first, chosen))
