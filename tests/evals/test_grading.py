"""Grading against cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.evals.grading import (
    edit_distance,
    exact_match,
    f1,
    found_numbers,
    found_words,
    normalized,
    quoted,
    similarity,
)


@pytest.mark.parametrize(
    ("numbers", "reply", "share"),
    [
        (["16979"], "The code is 16979.", 1.0),
        (["16979"], "The code is 16,979.", 1.0),
        (["16979"], "The code is 169790.", 0.0),
        (["16979"], "The code is 116979.", 0.0),
        (["16979"], "1, 6, 9, 7, 9", 0.0),
        (["16979", "20000", "30000", "40000"], "40000, 16979 and 12345", 0.5),
    ],
)
def test_numbers_count_as_whole_numbers(numbers: list[str], reply: str, share: float) -> None:
    assert found_numbers(numbers, reply) == share


def test_words_count_as_whole_words_in_any_case() -> None:
    assert found_words(["kelo", "rami", "tove"], "KELO, ramin; tove.") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_edit_distances(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance


@given(st.text("ab ", max_size=12), st.text("ab ", max_size=12))
def test_similarity_is_symmetric_and_between_0_and_1(a: str, b: str) -> None:
    assert 0 <= similarity(a, b) <= 1
    assert similarity(a, b) == similarity(b, a)
    assert similarity(a, a) == 1


def test_similarity_counts_words_and_punctuation() -> None:
    assert similarity("Call me Ishmael.", "Call me Ahab.") == 0.75  # one of four
    assert similarity("total += 81", "total += 82") == 0.75  # `+` and `=` are separate marks
    assert similarity("Call me Ishmael.", "") == 0


@pytest.mark.parametrize(
    ("reply", "quote"),
    [
        ("Call me Ishmael.", "Call me Ishmael."),
        ('It says: "Call me Ishmael." So it does.', "Call me Ishmael."),
        ('"Call me', "Call me"),
        ("Here:\n```python\nx = 1\n```\nThis sets x.", "x = 1"),
        ("```\nx = 1", "x = 1"),
        ('```python\nx = "a"\n```', 'x = "a"'),
    ],
)
def test_the_quoted_part_of_a_reply(reply: str, quote: str) -> None:
    assert quoted(reply) == quote


def test_answers_are_compared_without_articles_case_and_punctuation() -> None:
    assert normalized("  The  Eiffel Tower, a landmark! ") == "eiffel tower landmark"
    assert exact_match("the Eiffel Tower", "Eiffel tower.") == 1
    assert exact_match("Eiffel Tower", "Tower") == 0


@pytest.mark.parametrize(
    ("wanted", "reply", "value"),
    [
        ("Eiffel Tower", "the Eiffel Tower", 1.0),
        ("Eiffel Tower", "Tower of London", 0.4),  # one word shared: precision 1/3, recall 1/2
        (
            "new york new york",
            "New York",
            2 / 3,
        ),  # precision 1, recall 1/2: repeated words count each time
        ("Paris", "London", 0.0),
        ("yes", "yes, it is", 0.0),  # yes and no must match exactly
        ("yes", "Yes.", 1.0),
        ("the", "", 1.0),  # both are empty after normalization
        ("Paris", "", 0.0),
    ],
)
def test_f1_by_hand(wanted: str, reply: str, value: float) -> None:
    assert f1(wanted, reply) == pytest.approx(value)
