"""What an evaluation asks and how answers are judged. Pure: no model, no engine, no files."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from skim.evals.room import Room, Turns

Grades = Mapping[str, float]  # `score` in [0, 1], more is better; others beside it where a task has them


@dataclass(frozen=True)
class Sample:
    """One conversation to be had, and what is known of its right answer: plain, comparable data."""

    turns: Turns  # what the user says, turn by turn, in parts: documents, and last what is asked
    expected: tuple[str, ...]  # what the last reply is judged by
    max_tokens: int  # of each reply
    evidence: tuple[str, ...] = ()  # passages of the prompt that must be read to answer, at one place each


@dataclass(frozen=True)
class Draw:
    """What one sample is drawn from."""

    rng: random.Random  # this sample's own
    number: int  # of the sample, from 0
    seed: int  # of the whole run, for what samples must share out among them
    kind: str
    depth: float | None  # where the answer stands in the document: 0 begins it, 1 ends it; None: anywhere
    room: Room


class Evaluation(ABC):
    """Something that is measured over kinds, contexts and modes, from a source."""

    name: ClassVar[str]
    help: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    kinds_help: ClassVar[str] = ""  # what tells them apart, where there are several
    default_kinds: ClassVar[tuple[str, ...]]
    deep_kinds: ClassVar[tuple[str, ...]] = ()  # those with one answer, whose depth can be chosen
    source: ClassVar[Literal["text", "data", None]] = "text"  # a natural text, a data file, or nothing

    @abstractmethod
    def __init__(self, source: str) -> None:
        """From the content of the source."""


class Task(Evaluation):
    """Questions with answers. `draw` depends on its argument alone, `grade` on the sample and the reply."""

    @abstractmethod
    def draw(self, draw: Draw) -> Sample: ...

    @abstractmethod
    def grade(self, sample: Sample, reply: str) -> Grades: ...
