"""Prompts to calibrate with: facts hidden in natural text, as users send them, and questions about them.

Prompts are rendered with the chat template, if there is one. They have several lengths, and half of them hide
other facts of the same kind as distractors. With a chat template, some are transcripts of agents.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from skim.errors import ConfigError
from skim.evals.counting import Counter
from skim.evals.haystack import Haystack, insert
from skim.evals.messages import text_of
from skim.evals.room import Room, Turns
from skim.evals.task import Draw
from skim.evals.tasks.pairs import MAX_TOKENS, set_apart
from skim.evals.tasks.transcript import FORMS, Transcript
from skim.prefill.pairs import Kind, Pair, calibration, held_out
from skim.rendering import PLAIN, render
from skim.tokenization import encode_with_offsets, token_ids

LENGTHS = (2000, 8000, 20_000)  # tokens of a prompt: more blocks to rank find more heads that mislead
JUDGED = 4000  # tokens of a held-out prompt
AGENT = "agent"  # kind of a transcript
LEAST_AGENT = 4000  # tokens of a transcript
DISTRACTORS = 3


@dataclass(frozen=True)
class Order:
    """A prompt to draw."""

    kind: str  # a `Kind`, or `AGENT`
    number: int  # of the pair among those of its kind and half; for a transcript, see `_fact`
    context: int  # tokens of the prompt and the reply
    turn: int = 0  # counts the prompts of a pair
    distractors: int = 0
    held_out: bool = False

    @property
    def pair(self) -> Pair:
        kind, number = _fact(self.number) if self.kind == AGENT else (Kind(self.kind), self.number)
        return _half(kind, self.held_out)[number]


@dataclass(frozen=True)
class Prompt:
    """A prompt whose evidence is known."""

    order: Order
    tokens: np.ndarray
    question: range
    evidence: tuple[range, ...]  # the tokens of each passage's evidence


def orders(rounds: int, agents: bool, trials: int | None, lengths: Sequence[int] = LENGTHS) -> list[Order]:
    """The prompts to fit to: each calibration pair `rounds` times, kinds in turn, at most `trials`."""
    found: list[Order] = []
    for turn in range(rounds):
        for kind, number in _in_turns(agents, is_held_out=False):
            place = number + turn
            context = lengths[place % len(lengths)]
            if kind == AGENT:
                context = max(context, LEAST_AGENT)
            few = DISTRACTORS * (place // len(lengths) % 2)
            found.append(Order(kind, number, context, turn, 0 if kind == AGENT else few))
    return found[:trials]


def judged_orders(agents: bool, trials: int | None, length: int = JUDGED) -> list[Order]:
    """One prompt for each held-out pair, kinds in turn, at most `trials`."""
    pairs = _in_turns(agents, is_held_out=True)[:trials]
    return [Order(kind, number, length, held_out=True) for kind, number in pairs]


class Prompts:
    """Draws prompts for one model. A prompt depends only on the text, the seed and its order."""

    def __init__(self, tokenizer: Any, text: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._haystack = Haystack(text)
        self._seed = seed
        self._counter = Counter(lambda some: len(token_ids(tokenizer, some, add_special_tokens=False)))
        self._transcript = Transcript(self._haystack, lambda kind, number, seed: self._order.pair)

    @property
    def has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return render(self._tokenizer, messages, None, PLAIN, None)

    def draw(self, order: Order) -> Prompt:
        self._order = order
        rng = random.Random(f"{self._seed}/{order}")
        room = Room(order.context, self._counter.piece, lambda turns: self._counter.text(self._text(turns)))
        if order.kind == AGENT:
            draw = Draw(rng, order.number, self._seed, AGENT, None, room)
            turns = self._transcript.draw(draw).turns
        else:
            turns = self._hide(rng, order, room)
        pair, text = order.pair, self._text(turns)
        tokens, offsets = encode_with_offsets(self._tokenizer, text)
        starts, ends = offsets.T

        def span(some: str, at: int) -> range:
            if at < 0:
                raise ConfigError(f"the chat template changes the text {some!r}; calibrate without it")
            own = np.flatnonzero((starts < at + len(some)) & (ends > at))
            return range(int(own[0]), int(own[-1]) + 1)

        evidence = tuple(span(one, text.find(one)) for one in pair.evidence)
        asked = span(pair.question, text.rfind(pair.question))
        return Prompt(order, np.array(tokens, dtype=np.int64), asked, evidence)

    def _hide(self, rng: random.Random, order: Order, room: Room) -> Turns:
        pair = order.pair
        pool = [one for one in _half(Kind(order.kind), order.held_out) if one is not pair]
        others = rng.sample(pool, min(order.distractors, len(pool)))
        passages = [passage for one in (pair, *others) for passage in one.passages]
        facts = [(rng.random(), set_apart(passage)) for passage in passages]

        def build(sentences: Sequence[str]) -> Turns:
            return ((insert(sentences, facts) + "\n", pair.question),)

        return room.fill(self._haystack.sentences_from(rng), build, MAX_TOKENS)

    def _text(self, turns: Turns) -> str:
        if self.has_template:
            return text_of(self, turns)
        [parts] = turns
        return "\n".join(part for part in parts if isinstance(part, str))


def _half(kind: Kind, is_held_out: bool) -> tuple[Pair, ...]:
    return held_out(kind) if is_held_out else calibration(kind)


def _in_turns(agents: bool, *, is_held_out: bool) -> list[tuple[str, int]]:
    """Kind and number of every pair of a half: one of each kind, then the next of each, and so on."""
    counts = {kind: len(_half(kind, is_held_out)) for kind in Kind}
    turns = [[(str(kind), number) for number in range(count)] for kind, count in counts.items()]
    if agents:
        most = len(FORMS) * max(counts[form.facts] for form in FORMS)
        facts = ((number, *_fact(number)) for number in range(most))
        turns.append([(AGENT, number) for number, kind, place in facts if place < counts[kind]])
    return [one for turn in zip_longest(*turns) for one in turn if one is not None]


def _fact(number: int) -> tuple[Kind, int]:
    """Kind and number of the pair in a transcript. Forms take turns; one with fewer pairs leaves gaps."""
    return FORMS[number % len(FORMS)].facts, number // len(FORMS)
