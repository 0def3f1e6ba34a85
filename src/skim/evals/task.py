"""Base classes of evaluations: drawing samples and grading replies. Pure: no model, no engine, no files."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from skim.evals.room import Room, Turns

Grades = Mapping[str, float]  # `score` in [0, 1], higher is better, and any other grades of the task


@dataclass(frozen=True)
class Sample:
    """One conversation and its expected answer, as plain, comparable data."""

    turns: Turns  # each ends with the user's message in parts: documents first, the question last
    expected: tuple[str, ...]  # the answers that the last reply is graded against
    max_tokens: int  # per reply
    evidence: tuple[str, ...] = ()  # passages of the prompt needed to answer, one occurrence each
    whole: bool = False  # it asks about the whole text, so no part may be skipped silently
    kind: str = ""  # set if the task grades its kinds differently


@dataclass(frozen=True)
class Draw:
    """The inputs for drawing one sample."""

    rng: random.Random  # used by this sample only
    number: int  # index of the sample
    seed: int  # of the run, shared by all samples
    kind: str
    depth: float | None  # position of the answer in the document, from 0 (start) to 1 (end); None: anywhere
    room: Room


class Evaluation(ABC):
    """A measurement over kinds, contexts and modes, built from a source."""

    name: ClassVar[str]
    help: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    kinds_help: ClassVar[str] = ""  # their differences, if there are several
    default_kinds: ClassVar[tuple[str, ...]]
    deep_kinds: ClassVar[tuple[str, ...]] = ()  # kinds with one answer, whose depth can be set
    source: ClassVar[Literal["text", "data", None]] = "text"  # a natural text, a data file, or nothing

    @abstractmethod
    def __init__(self, source: str) -> None:
        """`source` is the text of the file."""


class Task(Evaluation):
    """Questions with answers. `draw` and `grade` depend only on their arguments."""

    has_evidence: ClassVar[bool] = True  # False: no passage has the answer, so `kept` is not measured

    @abstractmethod
    def draw(self, draw: Draw) -> Sample: ...

    @abstractmethod
    def grade(self, sample: Sample, reply: str) -> Grades: ...
