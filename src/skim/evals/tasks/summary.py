"""Requests about a whole text, such as a summary: skipping any part of it silently would be wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from skim.evals.haystack import Haystack
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample

MAX_TOKENS = 32  # of a reply that is not graded


@dataclass(frozen=True)
class Request:
    """Words of the user, after the text or before it. Without words, the text stands alone."""

    words: str
    before: bool = False


REQUESTS = (
    Request("Summarise the text."),
    Request("Please give me a summary of the above in about two hundred words."),
    Request("What is this text about?"),
    Request("Give me the key points."),
    Request("Translate the text into French."),
    Request("Rewrite it in simple words, for a child of ten."),
    Request("List all people in the text."),
    Request("How many chapters does the text have?"),
    Request("Write an outline of the whole document."),
    Request("Correct all spelling mistakes and return the full text."),
    Request("Which topics are covered?"),
    Request("Turn this into bullet points."),
    Request("tl;dr"),
    Request("Make a timeline of everything that happens."),
    Request("What do you think of it?"),
    Request("Describe the style and the mood of the author."),
    Request("Summarise the following text in one paragraph.", before=True),
    Request("Translate this into German:", before=True),
    Request("Here is a document. Extract every date and every place that it mentions.", before=True),
    Request(""),
)


class Summary:
    """The text and a request about all of it. Nothing is graded but the way in which it was read."""

    def __init__(self, haystack: Haystack) -> None:
        self._haystack = haystack

    def draw(self, draw: Draw) -> Sample:
        order = random.Random(draw.seed).sample(REQUESTS, len(REQUESTS))
        request = order[draw.number % len(order)]

        def build(sentences: Sequence[str]) -> Turns:
            text = " ".join(sentences)
            if request.before:
                return ((f"{request.words}\n\n{text}",),)
            return ((f"{text}\n", request.words) if request.words else (text,),)

        turns = draw.room.fill(self._haystack.sentences_from(draw.rng), build, MAX_TOKENS)
        return Sample(turns, (), MAX_TOKENS, whole=True)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {}
