"""The packaged pairs of facts and questions are what their kinds promise."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import PurePosixPath

import pytest

from skim.prefill.pairs import FILE_NAME, Kind, Pair, calibration, held_out, load_pairs
from skim.prefill.scoring.words import stem, words_of
from tests.paths import ROOT, SOURCE

COUNTS = {
    Kind.SHARED: 40,
    Kind.FAR: 174,
    Kind.NEXT: 44,
    Kind.TWO: 62,
    Kind.CODE: 76,
    Kind.TABLE: 44,
    Kind.LOGS: 76,
}
ONLY_FITTED = {Kind.FAR: 158}
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
HALVES = pytest.mark.parametrize("half", [calibration, held_out])
PAIRS = pytest.mark.parametrize("pair", load_pairs(), ids=lambda pair: pair.question)


def of(kind: Kind) -> pytest.MarkDecorator:
    pairs = [pair for pair in load_pairs() if pair.kind is kind]
    return pytest.mark.parametrize("pair", pairs, ids=lambda pair: pair.question)


def stems(text: str) -> set[str]:
    """Stems of the content words; `camelCase` is two words."""
    return {stem(word) for word in words_of(CAMEL.sub(" ", text))} - {""}


def common(left: str, right: str) -> set[str]:
    """Content stems, or first five letters of them, that two texts share."""
    one, other = ({form for found in stems(text) for form in (found, found[:5])} for text in (left, right))
    return one & other


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def places(needle: str, text: str) -> int:
    """Number of occurrences as whole words."""
    return len(re.findall(rf"(?<!\w){re.escape(needle)}(?!\w)", text))


def test_five_hundred_pairs_or_more_with_a_fixed_count_per_kind() -> None:
    assert len(load_pairs()) >= 500
    assert Counter(pair.kind for pair in load_pairs() if not pair.is_only_fitted) == COUNTS
    assert Counter(pair.kind for pair in load_pairs() if pair.is_only_fitted) == ONLY_FITTED


def test_no_text_occurs_twice() -> None:
    for texts in (
        [pair.question.lower() for pair in load_pairs()],
        [pair.answer.lower() for pair in load_pairs()],
        [passage for pair in load_pairs() for passage in pair.passages],
    ):
        assert [text for text, times in Counter(texts).items() if times > 1] == []


@pytest.mark.parametrize("kind", list(Kind))
def test_the_halves_are_disjoint_and_equal_in_size_but_for_pairs_that_are_only_fitted(kind: Kind) -> None:
    assert len(held_out(kind)) == COUNTS[kind] // 2
    assert len(calibration(kind)) == len(held_out(kind)) + ONLY_FITTED.get(kind, 0)
    assert not any(pair.is_only_fitted for pair in held_out(kind))
    assert not set(calibration(kind)) & set(held_out(kind))
    assert {pair.kind for pair in calibration(kind) + held_out(kind)} == {kind}


@PAIRS
def test_evidence_is_part_of_its_passage_and_has_the_answer(pair: Pair) -> None:
    assert len(pair.passages) == len(pair.evidence) == (2 if pair.kind is Kind.TWO else 1)
    for passage, evidence in zip(pair.passages, pair.evidence, strict=True):
        assert evidence.strip()
        assert evidence in passage
    assert pair.answer in pair.evidence[-1]
    assert 1 <= len(pair.answer.split()) <= 4


@PAIRS
def test_the_answer_occurs_once_and_not_in_the_question(pair: Pair) -> None:
    assert places(pair.answer, "\n".join(pair.passages)) == 1
    assert places(pair.answer.lower(), pair.question.lower()) == 0


@of(Kind.FAR)
def test_a_far_question_shares_no_content_word_with_its_passage(pair: Pair) -> None:
    assert common(pair.question, pair.passages[0]) == set()


@of(Kind.SHARED)
def test_a_shared_question_repeats_words_of_its_evidence(pair: Pair) -> None:
    assert len(stems(pair.question) & stems(pair.evidence[0])) >= 3


@of(Kind.NEXT)
def test_the_answer_stands_in_the_sentence_after_the_words_of_the_question(pair: Pair) -> None:
    asked, answering = sentences(pair.evidence[0])
    assert len(stems(pair.question) & stems(asked)) >= 3
    assert pair.answer in answering
    assert common(pair.question, answering) == set()


@of(Kind.TWO)
def test_neither_of_two_passages_suffices(pair: Pair) -> None:
    first, second = pair.passages
    assert stems(first) & stems(pair.question) - stems(second), "only the first identifies the subject"
    assert stems(first) & stems(second) - stems(pair.question), "a name leads from one to the other"
    assert pair.answer not in first


@HALVES
@pytest.mark.parametrize("kind", [Kind.CODE, Kind.LOGS])
def test_half_of_the_questions_about_code_and_logs_share_no_word(half, kind: Kind) -> None:
    alike = [bool(common(pair.question, pair.evidence[0])) for pair in half(kind)]
    assert sum(alike) == len(alike) // 2


@of(Kind.CODE)
def test_code_is_short_and_indented(pair: Pair) -> None:
    lines = pair.passages[0].split("\n")
    assert 5 <= len(lines) <= 14
    assert any(line.startswith((" ", "\t")) for line in lines)


@of(Kind.TABLE)
def test_a_table_has_several_rows_and_one_tells(pair: Pair) -> None:
    assert 4 <= len(pair.passages[0].split("\n")) <= 10
    assert pair.evidence[0] in pair.passages[0].split("\n")


@of(Kind.LOGS)
def test_a_log_has_several_lines_and_one_tells(pair: Pair) -> None:
    assert 3 <= len(pair.passages[0].split("\n")) <= 8
    assert pair.evidence[0] in pair.passages[0].split("\n")


def test_the_package_ships_the_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["skim"]
    file = PurePosixPath("data") / FILE_NAME
    assert (SOURCE / file).is_file()
    assert any(file.match(pattern) for pattern in patterns)
