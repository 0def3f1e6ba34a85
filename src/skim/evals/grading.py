"""Grades replies: matches, edit distances and word overlap. Pure functions."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Iterable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = {"yes", "no", "noanswer"}
_QUOTATION = re.compile(r'["\u201c](.+?)(?:["\u201d]|\Z)', re.DOTALL)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def found_numbers(numbers: Sequence[str], reply: str) -> float:
    """The fraction of the numbers found in the reply, with or without commas between thousands."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", reply)
    return _share(bool(re.search(rf"(?<!\d){re.escape(number)}(?!\d)", plain)) for number in numbers)


def found_words(words: Sequence[str], reply: str) -> float:
    """The fraction of the words found in the reply, as whole words, ignoring case."""
    said = set(re.findall(r"\w+", reply.lower()))
    return _share(word.lower() in said for word in words)


def found_phrases(phrases: Sequence[str], reply: str) -> float:
    """The fraction of the phrases found in the reply, as whole words, ignoring case and punctuation."""
    said = f" {normalized(reply)} "
    return _share(f" {normalized(phrase)} " in said for phrase in phrases)


def _share(hits: Iterable[bool]) -> float:
    return statistics.fmean(map(float, hits))


# -- verbatim


def similarity(wanted: str, reply: str) -> float:
    """1 - edit distance / length of the longer text, counted in words and punctuation marks.

    Counted in characters, any two texts of one language would be about a quarter alike.
    """
    a, b = (re.findall(r"\w+|[^\w\s]", text) for text in (wanted, reply))
    return 1 - edit_distance(a, b) / max(len(a), len(b), 1)


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The fewest insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            change = diagonal + (left != right)
            diagonal = row[j]
            row[j] = min(change, diagonal + 1, row[j - 1] + 1)
    return row[-1]


def quoted(reply: str) -> str:
    """The quoted part of a reply: its first fenced block, else its first quotation, else all of it."""
    match = _FENCE.search(reply) or _QUOTATION.search(reply)
    return (match[1] if match else reply).strip()


# -- short answers


def normalized(answer: str) -> str:
    """SQuAD's normalization: lower case, without punctuation, articles and extra white space."""
    letters = "".join(char for char in answer.lower() if char not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def exact_match(wanted: str, reply: str) -> float:
    return float(normalized(wanted) == normalized(reply))


def f1(wanted: str, reply: str) -> float:
    """The harmonic mean of word precision and recall; `yes` and `no` must match exactly."""
    want, have = normalized(wanted), normalized(reply)
    if want != have and (want in _CLOSED or have in _CLOSED):
        return 0.0
    wanted_words, words = want.split(), have.split()
    if not wanted_words or not words:
        return float(wanted_words == words)
    common = (Counter(wanted_words) & Counter(words)).total()
    return 2 * common / (len(wanted_words) + len(words))
