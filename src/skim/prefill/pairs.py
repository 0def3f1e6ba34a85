"""Facts and questions about them, written for Skim. They calibrate scorers and evaluate them.

One pair per line. Of each kind, every other line is held out: calibration never sees it. Lines with
`"only": "calibration"` do not count for that: they are never held out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

FILE_NAME = "pairs.jsonl"


class Kind(StrEnum):
    """Relation between a question and its evidence, or the form of the passage."""

    SHARED = "shared"  # the question repeats the fact's words
    FAR = "far"  # question and evidence share no content word
    NEXT = "next"  # one sentence has the question's words, the next one the answer
    TWO = "two"  # the first passage leads to the second, which has the answer
    CODE = "code"  # a function, class or query
    TABLE = "table"  # rows or a list
    LOGS = "logs"  # lines of a log


@dataclass(frozen=True)
class Pair:
    """Passages to hide in a prompt, and a question about them.

    `evidence[i]` is the part of `passages[i]` that the answer needs. The last evidence contains `answer`.
    """

    kind: Kind
    passages: tuple[str, ...]
    evidence: tuple[str, ...]
    question: str
    answer: str
    is_only_fitted: bool = False  # never held out


@cache
def load_pairs() -> tuple[Pair, ...]:
    """All packaged pairs, in the order of the file."""
    lines = (resources.files("skim") / "data" / FILE_NAME).read_text(encoding="utf-8")
    return tuple(_pair(json.loads(line)) for line in lines.split("\n") if line)


def calibration(kind: Kind) -> tuple[Pair, ...]:
    """The pairs of a kind that calibration may use."""
    return _of_kind(kind)[::2] + _of_kind(kind, is_only_fitted=True)


def held_out(kind: Kind) -> tuple[Pair, ...]:
    """The pairs of a kind that only evaluation may use."""
    return _of_kind(kind)[1::2]


def _of_kind(kind: Kind, *, is_only_fitted: bool = False) -> tuple[Pair, ...]:
    return tuple(pair for pair in load_pairs() if pair.kind is kind and pair.is_only_fitted is is_only_fitted)


def _pair(found: dict[str, Any]) -> Pair:
    return Pair(
        kind=Kind(found["kind"]),
        passages=tuple(found["passages"]),
        evidence=tuple(found["evidence"]),
        question=found["question"],
        answer=found["answer"],
        is_only_fitted=found.get("only") == "calibration",
    )
