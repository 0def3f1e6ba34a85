"""Two turns over one document, with the two answers in different places."""

from __future__ import annotations

from collections.abc import Sequence

from skim.evals.grading import found_numbers
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task
from skim.evals.tasks.needle import PLACES, WORDINGS, Wording, draw_numbers

FACTS = (  # of different kinds, so that a scorer asked for one rarely selects another
    WORDINGS["single"],
    Wording(
        "The telephone number of the {place} clinic is {number}.",
        "{place} clinic is {number}",
        "According to the text, what is the telephone number of the {place} clinic?",
    ),
    Wording(
        "The library budget in {place} is {number} dollars.",
        "budget in {place} is {number}",
        "According to the text, what is the library budget in {place}?",
    ),
    Wording(
        "The serial number of the {place} engine is {number}.",
        "{place} engine is {number}",
        "According to the text, what is the serial number of the {place} engine?",
    ),
)
APART = 0.25  # least distance between the two answers, as a fraction of the document


class TwoTurns(Task):
    """Score: 1 if the second reply contains the second number.

    The first reply is the model's own, right or wrong, as in a real conversation. All figures are of the
    second turn. Prompts are a little short of the context, to leave room for a first reply of full length.
    """

    name = "turns"
    help = "a second question about the same document, with its answer in another place"
    kinds = ("other", "same")
    kinds_help = (
        "other: the second fact is of another kind; same: it has the same wording but names another place"
    )
    default_kinds = ("other",)

    def __init__(self, source: str) -> None:
        self._haystack = Haystack(source)

    def draw(self, draw: Draw) -> Sample:
        rng = draw.rng
        wordings = [FACTS[0]] * 2 if draw.kind == "same" else rng.sample(FACTS, 2)
        filled = [
            {"place": place, "number": number}
            for place, number in zip(rng.sample(PLACES, 2), draw_numbers(rng, 2), strict=True)
        ]
        facts = [one.fact.format(**values) for one, values in zip(wordings, filled, strict=True)]
        first = rng.random()
        depths = [first, (first + APART + rng.random() * (1 - 2 * APART)) % 1]
        questions = [one.question.format(**values) for one, values in zip(wordings, filled, strict=True)]

        def build(sentences: Sequence[str]) -> Turns:
            document = insert(sentences, list(zip(depths, facts, strict=True)))
            return ((document + "\n", questions[0]), (questions[1],))

        most = max(one.max_tokens for one in wordings)
        turns = draw.room.fill(self._haystack.sentences_from(rng), build, 2 * most)
        evidence = wordings[1].telling.format(**filled[1])
        return Sample(turns, (filled[1]["number"],), most, (evidence,))

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_numbers(sample.expected, reply)}
