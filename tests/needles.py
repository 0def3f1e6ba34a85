"""Generated needle tasks: a fact hidden in natural text, and a question about it.

They calibrate scorers, so they vary: the question repeats the fact's words, rewords it, or shares no content
word with it. Facts of the same kind may stand next to it. The question is bare or wrapped in instructions.
The held-out half has other kinds of facts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Encode = Callable[[str], list[int]]


class Wording(StrEnum):
    """Wording of a question, relative to its fact."""

    PLAIN = "plain"  # with the fact's words
    REWORDED = "reworded"  # only the name is the same
    SIMILAR = "similar"  # the fact's words, and facts of the same kind about others beside it
    DESCRIBED = "described"  # no name, other words


@dataclass(frozen=True)
class Needle:
    """A fact as text before, in and after the answer; its question; and distracting facts."""

    before: str
    answer: str
    after: str
    question: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedleTask:
    """A prompt that ends with its question; `answer` has the indices of the answer's tokens."""

    tokens: tuple[int, ...]
    question: range
    answer: range
    wording: Wording


@dataclass(frozen=True)
class _Kind:
    """A kind of fact: {s} is its subject, {v} the value to find."""

    subjects: tuple[str, ...]
    values: tuple[str, ...]  # "#" stands for a random digit
    facts: tuple[str, ...]
    plain: str
    reworded: tuple[str, ...]


_CITIES = (
    "Oslo",
    "Lisbon",
    "Prague",
    "Dublin",
    "Nairobi",
    "Quito",
    "Hanoi",
    "Bergen",
    "Turin",
    "Porto",
    "Ghent",
)
_NAMES = ("Marta", "Jonas", "Priya", "Kofi", "Ingrid", "Tomas", "Yuki", "Elena", "Samir", "Greta", "Pablo")

_KINDS = (
    _Kind(
        _NAMES,
        ("locker ####", "drawer ##", "crate ###"),
        ("{s} left the tide chart in {v}.", "The tide chart of {s} was put into {v}."),
        "Where did {s} leave the tide chart?",
        ("In which place can the map of {s} be found?", "Where are the sea tables that {s} had?"),
    ),
    _Kind(
        _CITIES,
        ("#####",),
        ("The access code for the {s} office is {v}.", "To enter the {s} office one types {v}."),
        "What is the access code for the {s} office?",
        ("Which digits open the door at the {s} branch?", "I am outside our place in {s}; how do I get in?"),
    ),
    _Kind(
        _NAMES,
        ("lentil soup", "plum dumplings", "onion tart", "rye pancakes", "saffron rice", "grilled mackerel"),
        ("{s}'s favourite dish is {v}.", "The favourite dish of {s} is {v}."),
        "What is {s}'s favourite dish?",
        ("What does {s} like to eat most of all?", "Which meal would make {s} happy?"),
    ),
    _Kind(
        _CITIES,
        ("##### ##", "## ### ##"),
        ("The telephone number of the {s} clinic is {v}.", "The clinic in {s} is reached at {v}."),
        "What is the telephone number of the {s} clinic?",
        ("How can I call the doctors in {s}?", "Which number do I dial for a nurse in {s}?"),
    ),
    _Kind(
        _CITIES,
        ("marigold-###", "falcon-###", "thistle-###", "cobalt-###"),
        ("The password of the server in {s} is {v}.", "The server in {s} has the password {v}."),
        "What is the password of the server in {s}?",
        ("How do I log in to the machine at {s}?", "Which secret word unlocks the {s} computer?"),
    ),
    _Kind(
        _NAMES,
        (
            "an otter called Biscuit",
            "a parrot called Pepper",
            "a goat called Clover",
            "a ferret called Rufus",
        ),
        ("{s} keeps {v}.", "At home {s} has {v}."),
        "What animal does {s} keep?",
        ("Which creature lives with {s}?", "Tell me about the pet of {s}."),
    ),
    _Kind(
        _NAMES,
        ("room ###", "hall ##", "the annex, door ##"),
        ("The lecture of {s} takes place in {v}.", "{s} will give the lecture in {v}."),
        "In which room does the lecture of {s} take place?",
        ("Where should I go to hear {s} speak?", "Where is {s} presenting?"),
    ),
    _Kind(
        _CITIES,
        ("##### dollars", "### thousand pounds"),
        ("The budget of the {s} library is {v}.", "Every year the {s} library receives {v}."),
        "What is the budget of the {s} library?",
        ("How much money does the {s} reading hall get?", "What sum is spent on books at {s}?"),
    ),
)

_DESCRIBED = (
    (
        "The keeper hid the brass key under ",
        "the third stair",
        ".",
        "Where was what opens the tower concealed?",
    ),
    (
        "Breakfast is served from ",
        "half past six",
        " until nine.",
        "How early can guests eat in the morning?",
    ),
    ("The freezer must be kept at ", "minus eighty degrees", ".", "How cold should samples be stored?"),
    ("The bridge carries no more than ", "fourteen tons", ".", "What is the heaviest lorry that may cross?"),
    ("Payment is due within ", "twenty-one days", ".", "How long do customers have to settle a bill?"),
    ("The violin was made in ", "Cremona", " by a pupil.", "Where does the musical instrument come from?"),
    (
        "The train to the coast leaves from ",
        "platform eleven",
        ".",
        "Where must one wait to travel to the sea?",
    ),
    (
        "The vaccine was tested on ",
        "nine hundred volunteers",
        ".",
        "How many people were in the medical trial?",
    ),
    ("The museum is closed on ", "Tuesdays", ".", "On which weekday can one not see the exhibition?"),
    ("The encryption keys rotate every ", "ninety minutes", ".", "How often are the secrets renewed?"),
    (
        "The tournament was won by a girl from ",
        "Armenia",
        ".",
        "Which country does the young champion come from?",
    ),
    (
        "The roof was mended with ",
        "forty panes of glass",
        ".",
        "What was used to repair the top of the house?",
    ),
)

_FRAMES = (
    "\n\n{q}",
    "\n\nQuestion: {q}",
    "\n\n{q} Answer in one short sentence, and do not explain how you found it.",
    "\n\nYou are given a document above. Read it carefully and answer the question below. Answer briefly and "
    "use only the information in the text; if the answer is not in the document, say that you do not know."
    "\n\nQuestion: {q}\nAnswer:",
)


def draw_needle(rng: random.Random, wording: Wording, *, held_out: bool) -> Needle:
    """A random fact and its question, from the kinds for calibration or from those held out."""
    if wording is Wording.DESCRIBED:
        return Needle(*rng.choice(_DESCRIBED[int(held_out) :: 2]))
    kind = rng.choice(_KINDS[int(held_out) :: 2])
    subject, *strangers = rng.sample(kind.subjects, 5)
    before, after = rng.choice(kind.facts).format(s=subject, v="\0").split("\0")
    question = rng.choice(kind.reworded) if wording is Wording.REWORDED else kind.plain
    others: tuple[str, ...] = ()
    if wording is Wording.SIMILAR:
        others = tuple(rng.choice(kind.facts).format(s=one, v=_value(rng, kind)) for one in strangers)
    return Needle(before, _value(rng, kind), after, question.format(s=subject), others)


def make_task(
    rng: random.Random, text: str, encode: Encode, length: int, wording: Wording, *, held_out: bool = False
) -> NeedleTask:
    """About `length` tokens of `text` from a random place, a needle between sentences, and its question."""
    needle = draw_needle(rng, wording, held_out=held_out)
    fact = [encode(" " + needle.before.rstrip()), encode(" " + needle.answer), encode(needle.after)]
    others = [encode(" " + other) for other in needle.others]
    left = length - sum(map(len, [*fact, *others]))
    parts: list[Sequence[int]] = []
    for sentence in _sentences_from(rng, text):
        ids = encode(" " + sentence)
        if len(ids) > left:
            break
        left -= len(ids)
        parts.append(ids)
    for other in others:
        parts.insert(rng.randint(0, len(parts)), other)
    place = rng.randint(0, len(parts))
    start = sum(map(len, parts[:place])) + len(fact[0])
    parts[place:place] = fact
    body = [token for part in parts for token in part]
    question = encode(rng.choice(_FRAMES).format(q=needle.question))
    return NeedleTask(
        tokens=(*body, *question),
        question=range(len(body), len(body) + len(question)),
        answer=range(start, start + len(fact[1])),
        wording=wording,
    )


def _value(rng: random.Random, kind: _Kind) -> str:
    return re.sub("#", lambda _: str(rng.randrange(10)), rng.choice(kind.values))


def _sentences_from(rng: random.Random, text: str) -> list[str]:
    """The sentences of the text from a random one, wrapping around at its end."""
    start = rng.randrange(len(text))
    turned = text[start:] + " " + text[:start]
    return re.split(r"(?<=[.!?])\s+", turned[: 2**18])[1:]
