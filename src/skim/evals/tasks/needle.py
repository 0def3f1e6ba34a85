"""Needles: facts hidden between the sentences of a natural text, and a question about one or more of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skim.evals.grading import found_numbers
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task


@dataclass(frozen=True)
class Wording:
    """A hidden fact and its question. `telling` is the part of the fact that answers the question."""

    fact: str
    telling: str
    question: str
    asked: int = 1  # facts the question is about
    others: int = 0  # facts with the same wording about other places
    max_tokens: int = 24


_FACT = "The access code for the {place} office is {number}."
_TELLING = "{place} office is {number}"
_QUESTION = "According to the text, what is the access code for the {place} office?"

WORDINGS = {
    "single": Wording(_FACT, _TELLING, _QUESTION),
    "reworded": Wording(
        _FACT, _TELLING, "According to the text, which number opens the door at the {place} branch?"
    ),
    "similar": Wording(_FACT, _TELLING, _QUESTION, others=3),
    "multi-key": Wording(_FACT, _TELLING, _QUESTION, others=15),
    "multi-value": Wording(
        "One access code for the {place} office is {number}.",
        _TELLING,
        "According to the text, what are the four access codes for the {place} office? List all four.",
        asked=4,
        max_tokens=80,
    ),
    "four": Wording(
        _FACT,
        _TELLING,
        "According to the text, what are the access codes for the {places} offices? List all four.",
        asked=4,
        max_tokens=80,
    ),
}
PLACES = (
    *("Oslo", "Bergen", "Lisbon", "Cairo", "Quito", "Lima", "Hanoi", "Perth", "Turin", "Dakar"),
    *("Porto", "Ghent", "Dublin", "Prague", "Nairobi", "Madrid", "Vienna", "Athens", "Havana", "Boston"),
)


class Needle(Task):
    """Score: the fraction of the right numbers in the reply."""

    name = "needle"
    help = "facts hidden in natural text, over depths and contexts"
    kinds = tuple(WORDINGS)
    kinds_help = (
        "single: one fact, asked for in its own words; reworded: asked for in other words; similar: with 3 "
        "distractors that have the same wording but name other places; multi-key: with 15 such distractors; "
        "multi-value: all 4 facts about one place; four: one fact about each of 4 places"
    )
    default_kinds = ("single",)
    deep_kinds = ("single", "reworded", "similar", "multi-key")

    def __init__(self, source: str) -> None:
        self._haystack = Haystack(source)

    def draw(self, draw: Draw) -> Sample:
        wording = WORDINGS[draw.kind]
        names = draw_names(draw.rng, wording)
        numbers = draw_numbers(draw.rng, wording.asked + wording.others)
        facts = [
            wording.fact.format(place=name, number=number)
            for name, number in zip(names, numbers, strict=True)
        ]
        depths = [draw.rng.random() for _ in facts]
        if draw.depth is not None:
            depths[0] = draw.depth
        asked = names[: wording.asked]
        question = wording.question.format(
            place=asked[0], places=f"{', '.join(asked[:-1])} and {asked[-1]}" if asked[1:] else asked[0]
        )

        def build(sentences: Sequence[str]) -> Turns:
            document = insert(sentences, list(zip(depths, facts, strict=True)))
            return ((document + "\n", question),)

        turns = draw.room.fill(self._haystack.sentences_from(draw.rng), build, wording.max_tokens)
        evidence = tuple(
            wording.telling.format(place=name, number=number)
            for name, number in zip(asked, numbers, strict=False)
        )
        return Sample(turns, tuple(numbers[: wording.asked]), wording.max_tokens, evidence)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_numbers(sample.expected, reply)}


def draw_names(rng: random.Random, wording: Wording) -> list[str]:
    """A place for each fact: all different, or all the same if the question asks several facts about one."""
    if wording.asked > 1 and "{place}" in wording.question:
        return [rng.choice(PLACES)] * (wording.asked + wording.others)
    return rng.sample(PLACES, wording.asked + wording.others)


def draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Distinct five-digit numbers."""
    return [str(number) for number in rng.sample(range(10_000, 100_000), count)]
