"""Evidence of many kinds, hidden in long prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol

from skim.evals.haystack import Haystack
from skim.evals.task import Draw, Grades, Sample, Task
from skim.evals.tasks.pairs import Pairs
from skim.evals.tasks.quote import Quote
from skim.evals.tasks.summary import Summary
from skim.evals.tasks.trace import Trace
from skim.evals.tasks.transcript import Transcript


class Part(Protocol):
    """Draws and grades the samples of some kinds."""

    def draw(self, draw: Draw) -> Sample: ...

    def grade(self, sample: Sample, reply: str) -> Grades: ...


class Evidence(Task):
    """Score: 1 if the reply contains the answer; for hops and quote, as in trace and quote. `told`, for
    summary: 1 if the prompt was read in full or evenly.

    Facts and questions are written pairs that calibration never sees. If there are more samples than pairs,
    pairs repeat in other texts and places, and intervals are too narrow.
    """

    name = "evidence"
    help = "evidence of many kinds in long prompts, and requests about the whole prompt"
    kinds = (*Pairs.kinds, "hops", "quote", "agent", "summary")
    kinds_help = (
        "shared: the question repeats the fact's words; far: they share no content word; next: the answer is "
        "in the sentence after the question's words; two: one passage leads to another; code, table, logs: "
        "the form of the passage; hops: a chain of assignments; quote: a passage to repeat; agent: a "
        "transcript with the fact in an old tool result; summary: requests about the whole text"
    )
    default_kinds = kinds
    deep_kinds = ("shared", "far", "next", "code", "table", "logs", "quote")

    names: ClassVar[dict[str, str]] = {"hops": "chain", "quote": "passage"}  # kinds in their own tasks

    def __init__(self, source: str) -> None:
        haystack = Haystack(source)
        self._parts: dict[str, Part] = {
            **dict.fromkeys(Pairs.kinds, Pairs(haystack)),
            "hops": Trace(source),
            "quote": Quote(source),
            "agent": Transcript(haystack),
            "summary": Summary(haystack),
        }

    def draw(self, draw: Draw) -> Sample:
        own = replace(draw, kind=self.names.get(draw.kind, draw.kind))
        return replace(self._parts[draw.kind].draw(own), kind=draw.kind)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return self._parts[sample.kind].grade(sample, reply)
