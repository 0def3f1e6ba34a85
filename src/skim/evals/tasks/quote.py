"""Verbatim quotation of a passage of prose or a block of code from a long text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skim.errors import RequestError
from skim.evals.grading import quoted, similarity
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task

WORDS = range(30, 61)  # in a passage
MARGIN = 24  # tokens that a reply may have beyond the quotation

NOTICE = '\n\nThe {name} notice:\n"{text}"\n\n'
ASK_NOTICE = "Write out the {name} notice. Begin with its first word and repeat it word for word."
BLOCK = "\n\n```python\n{text}\n```\n\n"
ASK_BLOCK = "Repeat the Python function {name} exactly as it stands above."

NAMES = (
    "Heron",
    "Juniper",
    "Cobalt",
    "Lantern",
    "Marigold",
    "Thistle",
    "Quartz",
    "Falcon",
    "Saffron",
    "Otter",
)
VERBS = ("merge", "rank", "scale", "trim", "count", "blend", "shift", "split", "pack", "weigh")
NOUNS = (
    "orders",
    "signals",
    "parcels",
    "scores",
    "pixels",
    "tickets",
    "samples",
    "routes",
    "labels",
    "tides",
)
CODE = """\
def {name}(values, limit={a}):
    total, {extra} = {b}, []
    for index, value in enumerate(values):
        if value {compare} limit:
            total += value * {c}
            {extra}.append(index)
        else:
            total -= index % {d}
    return total {join} len({extra})"""


class Quote(Task):
    """Score: 1 - edit distance to the passage / longer length, in words and punctuation marks.

    Only the quoted part of a reply is graded. `exact`: 1 if the reply contains the passage character for
    character.
    """

    name = "quote"
    help = "a passage, or a block of code, repeated word for word"
    kinds = ("passage", "code")
    kinds_help = "passage: of the text; code: a block of code in it"
    default_kinds = kinds
    deep_kinds = kinds

    def __init__(self, source: str) -> None:
        self._haystack = Haystack(source)

    def draw(self, draw: Draw) -> Sample:
        rng = draw.rng
        if draw.kind == "code":
            name, text = draw_code(rng)
            fact, question = BLOCK.format(text=text), ASK_BLOCK.format(name=name)
        else:
            name, text = rng.choice(NAMES), self._passage(rng)
            fact, question = NOTICE.format(name=name, text=text), ASK_NOTICE.format(name=name)
        depth = rng.random() if draw.depth is None else draw.depth
        rest = (sentence for sentence in self._haystack.sentences_from(rng) if sentence not in text)

        def build(sentences: Sequence[str]) -> Turns:
            return ((insert(sentences, [(depth, fact)]) + "\n", question),)

        most = draw.room.count(text) + MARGIN
        return Sample(draw.room.fill(rest, build, most), (text,), most, (text,))

    def grade(self, sample: Sample, reply: str) -> Grades:
        [wanted] = sample.expected
        return {"score": similarity(wanted, quoted(reply)), "exact": float(wanted in reply)}

    def _passage(self, rng: random.Random) -> str:
        """A few consecutive sentences of the text. The caller leaves them out of the rest of the document."""
        words: list[str] = []
        for sentence in self._haystack.sentences_from(rng):
            more = sentence.split()
            plain = not any(mark in sentence for mark in '"\u201c\u201d')
            words = [*words, *more] if plain and len(words) + len(more) < WORDS.stop else []
            if len(words) in WORDS:
                return " ".join(words)
        raise RequestError(
            f"the text has no consecutive sentences with {WORDS.start} to {WORDS.stop - 1} words in all and "
            "no quotation marks; give another --text"
        )


def draw_code(rng: random.Random) -> tuple[str, str]:
    """A small function with a random name, random numbers and random operators: (name, text)."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    text = CODE.format(
        name=name,
        **{number: rng.randint(2, 99) for number in "abcd"},
        extra=rng.choice(("kept", "found", "chosen", "hits")),
        compare=rng.choice((">", "<", ">=", "<=")),
        join=rng.choice("+-*"),
    )
    return name, text
