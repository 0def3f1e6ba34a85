"""Two turns over one document: the second answer stands elsewhere than the first."""

from __future__ import annotations

from collections.abc import Sequence

from skim.evals.grading import found_numbers
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task
from skim.evals.tasks.needle import PLACES, WORDINGS, Wording, draw_numbers

FACTS = (  # of different kinds, so that asking for one seldom brings another along
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
APART = 0.25  # least distance between the two answers, as a share of the document


class TwoTurns(Task):
    """Score: the second number is in the second reply.

    The first reply is the model's own, right or wrong, as it is in a conversation; the figures are of the
    second turn. The context has room for a first reply of full length, so that prompts are a little shorter.
    """

    name = "turns"
    help = "a second question about the same document, whose answer stands elsewhere"
    kinds = ("other", "same")
    kinds_help = (
        "other: the second fact is of another kind; same: it is in the same words about another place"
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
        turns = draw.room.fill(self._haystack.read_from(rng), build, 2 * most)
        evidence = wordings[1].telling.format(**filled[1])
        return Sample(turns, (filled[1]["number"],), most, (evidence,))

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_numbers(sample.expected, reply)}
