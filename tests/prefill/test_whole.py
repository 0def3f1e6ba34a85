"""Questions about a whole text are recognised by their words, or by scores that are spread evenly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.evals.tasks.summary import REQUESTS
from skim.prefill.pairs import Pair, load_pairs
from skim.prefill.whole import FLAT, asks_for_everything, spread

SCORES = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=60)


@pytest.mark.parametrize("words", [request.words for request in REQUESTS if request.words])
def test_a_request_about_the_whole_text(words: str) -> None:
    assert asks_for_everything(words)
    assert asks_for_everything(words.upper())


@pytest.mark.parametrize("pair", load_pairs(), ids=lambda pair: pair.question)
def test_a_question_about_a_fact(pair: Pair) -> None:
    assert not asks_for_everything(pair.question)


@pytest.mark.parametrize(
    "words",
    [
        "Fasse den Text zusammen.",
        "Übersetze das ins Englische.",
        "Résume ce texte.",
        "Fais un résumé en dix lignes.",
        "Resume el texto en tres frases.",
        "Haz un resumen.",
        "总结一下这篇文章",
        "この文章を要約して",
    ],
)
def test_a_request_in_another_language(words: str) -> None:
    assert asks_for_everything(words)


@pytest.mark.parametrize(
    "words",
    [
        "List all rooms with a piano.",
        "Name every port that the captain visited.",
        "Give me all codes containing a 7.",
        "How do I resume the upload?",
        "When was the work resumed?",
        "What does Ann's résumé say about Oslo?",
        "What is the code for the oil store?",
        "How many people attended the meeting on 4 May?",
        "How many times did Anna visit Bergen?",
        "How many pages does the contract with Acme have?",
        "What does the report say about the budget of 2019?",
        "What happens in the scene with the dog?",
        "Did the committee review the plan of 1998?",
        "Who made the English translation?",
        "Who wrote the executive summary?",
        "Find all usages of parse_config.",
        "Which bullet point mentions fish?",
        "What was the summary judgment about?",
        "Who wrote the overview of the Dover line?",
        "In the entire document, where is the code?",
        "",
    ],
)
def test_a_question_about_one_thing(words: str) -> None:
    assert not asks_for_everything(words)


@given(SCORES)
def test_the_spread_is_a_fraction_of_the_blocks(scores: list[float]) -> None:
    found = spread(scores)
    assert 0.0 <= found <= 1.0 + 1e-9
    if max(scores) > 0:
        assert found >= 1 / len(scores) * (1 - 1e-9)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(1e-3, 1e6))
def test_equal_scores_are_spread_over_their_blocks(some: int, blocks: int, score: float) -> None:
    some = min(some, blocks)
    assert spread([score] * some + [0.0] * (blocks - some)) == pytest.approx(some / blocks)


@given(SCORES, st.randoms())
def test_order_and_unit_do_not_matter(scores: list[float], rng: object) -> None:
    expected = spread(scores)
    shuffled = list(scores)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert spread(shuffled) == pytest.approx(expected)
    assert spread([0.5 * score for score in scores]) == pytest.approx(expected)


def test_without_a_score_nothing_was_found() -> None:
    assert spread([0.0] * 9) == 1.0
    assert spread([-1.0, -2.0]) == 1.0


def test_one_block_that_stands_out_is_not_flat() -> None:
    assert spread([math.exp(-4)] * 99 + [1.0]) < FLAT < spread([0.5, 0.6, 0.4, 0.5])
