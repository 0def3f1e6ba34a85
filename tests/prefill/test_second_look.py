"""The second look: which blocks are read again, and how their chance is divided."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skim import SamplingParams
from skim.config import PrefillConfig
from skim.prefill.anatomy import Anatomy
from skim.prefill.planner import Planner
from skim.prefill.request import Request
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring import second_look
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, Second
from skim.prefill.scoring.combine import odds, outstanding
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.features import Feature, Statistic
from skim.prefill.scoring.likelihood import LikelihoodScorer
from skim.prefill.scoring.scorer import Scorer, ScoringTask, run_to_completion, together
from skim.prefill.scoring.second_look import LEAST, MOST, SHARE, SecondLook, choose, count_of, divided_anew
from tests import paths, tiny
from tests.prefill.small import Model, drive


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
    first, own, asked, shared, alike = rng.normal(size=(5, 64))
    scorer, likelihood = Fixed(own), Fixed(asked)
    weights = Second((Feature(Statistic.MAX, 0, 0, 1.0),), 0.5, (2.0, -3.0), 512, 1.5)
    look = SecondLook(scorer, likelihood, weights)
    assert look.is_worthwhile(64)
    assert not look.is_worthwhile(15)
    logits = first.copy()
    run_to_completion(look.rank(task, logits, (shared, alike)))
    chosen = choose(first, 16)
    assert scorer.asked == likelihood.asked == chosen.tolist()
    expected = (own + 1.5 * asked + 0.5 * first + 2 * shared - 3 * alike)[chosen]
    assert logits[chosen] - logits[chosen].max() == pytest.approx(expected - expected.max())
    assert np.array_equal(np.delete(logits, chosen), np.delete(first, chosen))


# With a model


FIRST = Calibration(
    (0, 1), (Feature(Statistic.MAX, 0, 1, 1.0), Feature(Statistic.ZMAX, 1, 2, -0.4)), (0.2, 0.3)
)
SECOND = Second(
    (Feature(Statistic.MEAN, 1, 0, 0.7), Feature(Statistic.ZCUBE, 3, 3, 1.5)),
    0.6,
    (0.4, -0.5),
    window=64,
    likelihood=0.8,
)


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny.with_our_attention("llama")


def blend(module: Any, directory: Path, second: Second | None) -> Scorer:
    """The default scorer of a model with this calibration beside it."""
    replace(FIRST, second=second).save(directory / FILE_NAME)
    return make_scorers(Model(module, path=directory), None)("blend")


def prompt(blocks: int, start: int = 0, **options: Any) -> ScoringTask:
    text = paths.BOOK[start:].encode("ascii", "ignore")[: 16 * blocks]
    tokens = (*text, *b"the white whale?")
    return ScoringTask(tokens, (range(len(text), len(tokens)),), 16, **options)


def test_the_default_scorer_divides_the_chance_of_the_best_blocks_by_a_second_reading(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    told: list[int] = []
    task = prompt(47, on_second_look=told.append)
    first = np.log(drive(blend(module, tmp_path, None), task)[:47])
    assert told == []
    found = np.log(drive(blend(module, tmp_path, SECOND), task)[:47])

    chosen = choose(first, 11)
    assert told == [11]
    again = AttentionScorer(module, SECOND.calibration(), window=64)
    own = np.log(np.array(drive(again, task.only(chosen.tolist())))[chosen])
    words = [
        outstanding(np.array(drive(scorer, task)))[chosen]
        for scorer in (LexicalScorer(decoder_of(tiny.tokenizer())), EmbeddingScorer(module))
    ]
    asked = run_to_completion(LikelihoodScorer(module, tiny.tokenizer()).gains(task.only(chosen.tolist())))
    beside = 0.6 * first[chosen] + 0.4 * words[0] - 0.5 * words[1] + 0.8 * asked
    expected = divided_anew(first, chosen, own + beside)
    assert found - found.max() == pytest.approx(expected - expected.max(), abs=1e-4)
    assert np.argsort(-found).tolist() != np.argsort(-first).tolist()


def test_short_prompts_are_read_once(module: Any, tmp_path: Path) -> None:
    told: list[int] = []
    task = prompt(47, on_second_look=told.append)
    once = drive(blend(module, tmp_path, None), task)
    assert drive(blend(module, tmp_path, SECOND), task) == once
    assert told == []


def test_a_cpu_with_a_limited_budget_reads_once(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    told: list[int] = []
    drive(blend(module, tmp_path, SECOND), prompt(47, scoring_budget=0.99, on_second_look=told.append))
    assert told == []


def test_a_second_look_does_not_depend_on_prompts_before_or_beside_it(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    alone = drive(blend(module, tmp_path, SECOND), prompt(50))
    scorer = blend(module, tmp_path, SECOND)
    drive(scorer, prompt(70, start=5000))
    beside = together([scorer.score(prompt(50)), scorer.score(prompt(41, start=9000))])
    assert run_to_completion(beside)[0] == alone


def test_the_plan_tells_of_a_second_look(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "LEAST", 4)
    task = prompt(94)
    asked = Request(
        task.tokens,
        SamplingParams(max_tokens=4),
        PrefillConfig(sparse_prefill="always", keep_tokens=256, prefill_block_size=16, scoring_budget=1.0),
        Anatomy(task.tokens, task.question, task.question),
    )
    for second, blocks in ((SECOND, 23), (None, 0)):
        scorer = blend(module, tmp_path, second)
        by = Planner(lambda _, own=scorer: own, 1 << 20, lambda *_: 0, decoder_of(tiny.tokenizer()))  # type: ignore[misc]
        plan = run_to_completion(by.plan(asked)).plan
        assert plan is not None
        assert plan.read_again == blocks
        assert plan.summary().endswith("s, 23 read again" if blocks else "s")
