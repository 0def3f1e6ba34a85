"""Variable tracking: a chain of assignments, scattered through a text, that starts with a number."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from itertools import pairwise

from skim.evals.grading import found_words
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task
from skim.evals.tasks.needle import draw_numbers

HOPS = 4  # assignments from one variable to the next
FIRST = "VAR {name} = {value}."
NEXT = "VAR {name} = VAR {value}."
QUESTION = "Find all variables that have the value {value}. List the names of all {count} variables."
MAX_TOKENS = 64


class Trace(Task):
    """Score: the fraction of the chain's names in the reply.

    Only the first assignment contains the value in the question; the others must be found through it.
    """

    name = "trace"
    help = "variables assigned to each other, tracked through natural text"
    kinds = ("chain", "decoy")
    kinds_help = "chain: one chain of assignments; decoy: with a second chain for another value"
    default_kinds = ("chain",)

    def __init__(self, source: str) -> None:
        self._haystack = Haystack(source)

    def draw(self, draw: Draw) -> Sample:
        rng = draw.rng
        chains = 2 if draw.kind == "decoy" else 1
        names, values = draw_variables(rng, chains * (HOPS + 1)), draw_numbers(rng, chains)
        facts: list[tuple[float, str]] = []
        for number, value in enumerate(values):
            lines = assignments(names[number * (HOPS + 1) : (number + 1) * (HOPS + 1)], value)
            depths = sorted(rng.random() for _ in lines)  # a variable is known before it is used
            facts += zip(depths, lines, strict=True)
        question = QUESTION.format(value=values[0], count=HOPS + 1)

        def build(sentences: Sequence[str]) -> Turns:
            return ((insert(sentences, facts) + "\n", question),)

        turns = draw.room.fill(self._haystack.sentences_from(rng), build, MAX_TOKENS)
        evidence = tuple(line for _, line in facts[: HOPS + 1])
        return Sample(turns, tuple(names[: HOPS + 1]), MAX_TOKENS, evidence)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_words(sample.expected, reply)}


def assignments(names: Sequence[str], value: str) -> list[str]:
    """Assign the value to the first variable, and each variable to the next."""
    first = FIRST.format(name=names[0], value=value)
    return [first, *(NEXT.format(name=b, value=a) for a, b in pairwise(names))]


def draw_variables(rng: random.Random, count: int) -> list[str]:
    """Distinct names of five capital letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(found)
