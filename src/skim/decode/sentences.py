"""Tokens that end a sentence, by the text of each token alone."""

from __future__ import annotations

import re
from collections.abc import Callable

ENDS = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["')\]\u201d\u2019\u300d]*\s*$|\n\s*\n""")
"""A full stop, an exclamation or question mark at the end, perhaps before closing marks, or an empty line."""


def ends_sentence(piece: str) -> bool:
    """True if the text of a token ends a sentence."""
    return ENDS.search(piece) is not None


class SentenceEnds:
    """Looks tokens up, each once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, bool] = {}

    def __call__(self, token: int) -> bool:
        if token not in self._known:
            try:
                self._known[token] = ends_sentence(self._decode([token]))
            except Exception:  # a token without a text fails its own request, where the text is made
                self._known[token] = False
        return self._known[token]
