"""Questions over several documents, from a file in HotpotQA's format, among distractors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skim.errors import RequestError
from skim.evals.grading import exact_match, f1
from skim.evals.haystack import insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample, Task

ASK = "{question} Answer with a few words only."
MAX_TOKENS = 32
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Item:
    """A question, its answer, the documents needed to answer it, and its distractors."""

    question: str
    answer: str
    needed: dict[str, str]  # by title
    others: dict[str, str]
    evidence: tuple[str, ...]  # the sentences that contain the answer


class QA(Task):
    """Score: SQuAD's F1 between the answer and the first line of the reply. `exact`: exact match."""

    name = "qa"
    help = "questions over several documents, in HotpotQA's format, among distractors"
    kinds = ("distractors",)
    default_kinds = kinds
    source = "data"

    def __init__(self, source: str) -> None:
        self._items = parse(source)

    def draw(self, draw: Draw) -> Sample:
        if draw.number >= len(self._items):
            raise RequestError(
                f"--data has {len(self._items)} questions; give a larger file, or a smaller --n"
            )
        order = random.Random(draw.seed).sample(range(len(self._items)), len(self._items))
        item = self._items[order[draw.number]]
        placed = [(draw.rng.random(), text) for text in item.needed.values()]
        question = ASK.format(question=item.question)

        def build(documents: Sequence[str]) -> Turns:
            return ((insert(documents, placed, SEPARATOR) + "\n", question),)

        turns = draw.room.fill(self._distractors(item, draw.rng), build, MAX_TOKENS, SEPARATOR)
        return Sample(turns, (item.answer,), MAX_TOKENS, item.evidence)

    def grade(self, sample: Sample, reply: str) -> Grades:
        first, [wanted] = reply.strip().splitlines()[0], sample.expected
        return {"score": f1(wanted, first), "exact": exact_match(wanted, first)}

    def _distractors(self, item: Item, rng: random.Random) -> Iterator[str]:
        """The question's own distractors, then the documents of other questions; each title once."""
        seen = set(item.needed)
        for one in [item, *rng.sample(self._items, len(self._items))]:
            documents = list({**one.others, **one.needed}.items())
            for title, text in rng.sample(documents, len(documents)):
                if title not in seen:
                    seen.add(title)
                    yield text


def parse(source: str) -> list[Item]:
    """Parse a file of questions. An error names the question that is not in the format."""
    try:
        found = json.loads(source)
    except ValueError as error:
        raise RequestError(f"--data is not JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise RequestError("--data must be a list of questions in HotpotQA's format")
    items = []
    for number, one in enumerate(found):
        try:
            items.append(_item(one))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RequestError(
                f"--data: question {number} is not in HotpotQA's format (question, answer, context, "
                f"supporting_facts): {type(error).__name__}: {error}"
            ) from error
    return items


def _item(one: dict[str, Any]) -> Item:
    sentences = {str(title): [str(text) for text in texts] for title, texts in one["context"]}
    documents = {title: f"{title}\n{''.join(texts).strip()}" for title, texts in sentences.items()}
    facts = [(str(title), int(index)) for title, index in one["supporting_facts"]]
    # Some facts of the published files point past the end of their document.
    evidence = [sentences[title][index].strip() for title, index in facts if index < len(sentences[title])]
    if not evidence or not all(evidence):
        raise ValueError("no supporting fact points to a sentence")
    needed = {title for title, _ in facts}
    return Item(
        str(one["question"]).strip(),
        str(one["answer"]).strip(),
        {title: text for title, text in documents.items() if title in needed},
        {title: text for title, text in documents.items() if title not in needed},
        tuple(dict.fromkeys(evidence)),
    )
