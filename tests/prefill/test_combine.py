"""Scores of different kinds become one: standardised, weighted, and read as logarithms of odds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from skim.prefill.scoring.combine import log_attention, odds, outstanding, standardised, word_logits

VALUES = arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e6, 1e6, allow_subnormal=False))
HEADS = arrays.arrays(np.float64, (3, 20), elements=st.floats(0, 1, allow_subnormal=False))


@given(VALUES)
def test_standardised_values_have_no_mean_and_a_spread_of_one(values: np.ndarray) -> None:
    found = standardised(values)
    assume(values.std() > max(1e-8, 1e-6 * np.abs(values).max()))  # not noise
    assert abs(found.mean()) < 1e-6
    assert found.std() == pytest.approx(1.0, abs=1e-6)
    assert (np.diff(found[np.argsort(values)]) >= 0).all()


@given(st.floats(-1e6, 1e6), st.integers(0, 20))
def test_equal_values_do_not_stand_out(value: float, count: int) -> None:
    assert standardised(np.full(count, value)) == pytest.approx(np.zeros(count), abs=1e-9)
    assert outstanding(np.full(count, value)).tolist() == [0.0] * count


@given(VALUES, st.floats(0.01, 100), st.floats(-100, 100))
def test_units_do_not_matter(values: np.ndarray, factor: float, shift: float) -> None:
    assume(values.std() > 1e-3 * (np.abs(values).max() + 100))
    assert standardised(factor * values + shift) == pytest.approx(standardised(values), abs=1e-6)


@given(VALUES)
def test_values_below_the_mean_count_as_none(values: np.ndarray) -> None:
    found = outstanding(values)
    assert (found >= 0).all()
    assert np.array_equal(found > 0, standardised(values) > 0)


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e9, 1e9)))
def test_odds_are_positive_and_finite_and_the_best_are_one(logits: np.ndarray) -> None:
    found = odds(logits)
    assert found.max() == 1.0
    assert (found > 0).all()
    assert np.isfinite(found).all()
    order = np.argsort(logits, kind="stable")
    assert (np.diff(found[order]) >= 0).all()


@given(arrays.arrays(np.float64, st.integers(2, 20), elements=st.floats(-25, 25)))
def test_the_logarithm_of_odds_is_the_difference_to_the_best(logits: np.ndarray) -> None:
    assert np.log(odds(logits)) == pytest.approx(logits - logits.max(), abs=1e-9)


def test_without_blocks_there_are_no_odds() -> None:
    assert odds(np.zeros(0)).tolist() == []
    assert standardised(np.zeros((3, 0))).shape == (3, 0)


@given(HEADS)
def test_a_heads_unit_of_attention_does_not_matter(heads: np.ndarray) -> None:
    """A head that attends to all blocks a hundred times less says the same."""
    heads = 0.001 + 0.999 * heads
    weak = heads * np.array([[1.0], [0.1], [0.01]])
    assert log_attention(weak) == pytest.approx(log_attention(heads), abs=0.2)


def test_words_count_by_their_weights() -> None:
    shared, alike = np.eye(4)[0], np.eye(4)[3]
    assert int(word_logits(shared, alike, (1.0, 0.3)).argmax()) == 0
    assert int(word_logits(shared, alike, (0.3, 1.0)).argmax()) == 3
    against = word_logits(shared, alike, (-1.0, 0.0))
    assert against[0] < against[1] == against[2] == against[3] == 0
