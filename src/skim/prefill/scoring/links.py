"""Links from one passage to the next: names and numbers that the question does not know.

A question names the first passage of a chain. The second one is found only through the first: "the winner of
the 2019 prize" leads to a name, and the name to a birthplace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from skim.prefill.scoring.words import stem, words_of

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LINK = re.compile(r"\b[A-Z]\w+|\w*\d\w*|\w+_\w+")
_OPENING = re.compile(r"^[\W_]*([A-Z][a-z]+)\b")  # a capital at the start of a sentence makes no name


def links(texts: Iterable[str], known: Set[str]) -> list[str]:
    """Stems of the names, numbers and identifiers beside the words in `known`, which are stems too.

    Of each text, only the sentences with the most known words count.
    """
    found: dict[str, None] = {}
    for text in texts:
        sentences = [(sentence, _stems(sentence)) for sentence in _SENTENCE_END.split(text)]
        most = max((len(known & set(stems)) for _, stems in sentences), default=0)
        for sentence, stems in sentences:
            if most and len(known & set(stems)) == most:
                opening = _OPENING.match(sentence)
                body = sentence[opening.end() :] if opening else sentence
                found.update(dict.fromkeys(_stems(" ".join(_LINK.findall(body)))))
    return [word for word in found if word not in known]


def _stems(text: str) -> list[str]:
    return [found for word in words_of(text) if (found := stem(word))]
