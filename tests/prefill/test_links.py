"""Names beside the question's words lead to passages that the question does not name."""

from __future__ import annotations

import pytest

from skim.prefill.scoring.links import links


@pytest.mark.parametrize(
    ("text", "known", "expected"),
    [
        ("The prize of 2019 went to Ingrid Solheim.", {"priz"}, ["2019", "ingrid", "solheim"]),
        ("The prize went to a woman of the north.", {"priz"}, []),  # no name
        ("Then the value of max_depth is read from limits_v2.", {"valu"}, ["max", "depth", "limit", "v2"]),
        ("The prize went to Ingrid. Meanwhile Jonas slept.", {"priz"}, ["ingrid"]),  # another sentence
        ("Prize of the year: Ingrid Solheim", {"priz"}, ["ingrid", "solheim"]),
        ("Jonas slept.", {"priz"}, []),  # beside no known word
        ("Ingrid won the prize.", {"priz"}, []),  # every sentence begins with a capital
        ("The prize went to Ingrid.", {"priz", "ingrid"}, []),  # nothing new
        ("", {"priz"}, []),
        ("The prize went to Ingrid.", set(), []),
    ],
)
def test_links_of_a_text(text: str, known: set[str], expected: list[str]) -> None:
    assert links([text], known) == expected


def test_only_the_sentences_with_the_most_known_words_lead_on() -> None:
    text = "The office prize went to Jonas. The prize of the Oslo office went to Ingrid."
    assert links([text], {"priz", "offic", "oslo"}) == ["ingrid"]
    assert links([text], {"priz", "offic"}) == ["jona", "oslo", "ingrid"]


def test_each_text_has_its_own_best_sentence_and_no_link_is_named_twice() -> None:
    texts = [
        "The prize of Oslo went to Ingrid.",
        "Another prize went to Ingrid and Jonas.",
        "Nothing for Kofi.",
    ]
    assert links(texts, {"priz"}) == ["oslo", "ingrid", "jona"]
    assert links([], {"priz"}) == []
