"""Encodes control tokens inside the texts of a conversation as plain text.

A chat template writes control tokens such as `<|im_start|>` around messages. In a message, the same
characters would end it and begin another one, perhaps of another role. So each is broken by a *mark*, a
character of Unicode's private use area that no text of the conversation contains. The template renders the
marked texts and the tokenizer encodes them. Then the marks are removed from the text, and their tokens too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from skim.errors import RequestError

T = TypeVar("T")
Offsets = np.ndarray

SLICE = 2**16
"""Characters searched in one call: a search holds Python's lock, and no other thread runs."""

_MARKS = [chr(code) for code in chain(range(0xE000, 0xE040), range(0xF800, 0xF840))]


class ControlTokens:
    """The control tokens of a tokenizer: those it calls special."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = sorted({str(one) for one in added if one.special and str(one)}, key=len, reverse=True)
        self._beginnings = {text[:2] for text in texts}
        self._longest = max(map(len, texts), default=1)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def are_in(self, value: Any) -> bool:
        """True if any text in `value`, nested at will, contains a control token."""
        if isinstance(value, str):
            # Most texts do not even contain their beginnings, which is quicker to find out.
            return any(two in value for two in self._beginnings) and any(self._found(value))
        if isinstance(value, Mapping):
            return any(map(self.are_in, value.keys())) or any(map(self.are_in, value.values()))
        return isinstance(value, Sequence) and any(map(self.are_in, value))

    def marked(self, value: T, mark: str) -> T:
        """A copy of `value` whose control tokens are broken by a mark after their first character."""
        marked: Any = value
        if isinstance(value, str):
            marked = self._marked_text(value, mark)
        elif isinstance(value, Mapping):
            marked = {self.marked(key, mark): self.marked(one, mark) for key, one in value.items()}
        elif isinstance(value, Sequence):
            marked = [self.marked(one, mark) for one in value]
        return marked  # type: ignore[no-any-return]

    def _marked_text(self, text: str, mark: str) -> str:
        parts, at = [], 0
        for found in self._found(text):
            parts += [text[at : found.start() + 1], mark]
            at = found.start() + 1
        return "".join([*parts, text[at:]])

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """The control tokens of a text, searched in slices. A slice reads on to the end of its last token."""
        at = 0
        for start in range(0, len(text), SLICE):
            stop = start + SLICE
            for found in self._pattern.finditer(text, max(at, start), stop + self._longest - 1):
                if found.start() >= stop:
                    break
                at = found.end()
                yield found


@lru_cache(maxsize=4)
def find_controls(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer, read once."""
    return ControlTokens(tokenizer)


def unused_mark(value: Any) -> str:
    """A mark that no text in `value` contains, neither as a character nor as its escape in JSON."""
    found = next((mark for mark in _MARKS if not _contains(value, mark)), None)
    if found is None:
        raise _refused("the messages contain control tokens and every private character")
    return found


def _contains(value: Any, mark: str) -> bool:
    if isinstance(value, str):
        return mark in value or ("\\u" in value and any(escape in value for escape in _escapes(mark)))
    if isinstance(value, Mapping):
        return any(_contains(one, mark) for one in chain(value.keys(), value.values()))
    return isinstance(value, Sequence) and any(_contains(one, mark) for one in value)


def with_plain_marks(rendered: str, mark: str) -> str:
    """A rendered text in which marks that the template escaped for JSON are characters again."""
    for escape in _escapes(mark):
        rendered = rendered.replace(escape, mark)
    return rendered


def _escapes(mark: str) -> tuple[str, str]:
    """The mark as JSON writes it in ASCII, with small or with capital digits."""
    return f"\\u{ord(mark):04x}", f"\\u{ord(mark):04X}"


def without_marks(tokens: Sequence[int], offsets: Offsets, text: str, mark: str) -> tuple[list[int], Offsets]:
    """The tokens of a marked text without those of its marks, and their offsets in the text without marks."""
    places = np.array([found.start() for found in re.finditer(mark, text)], dtype=np.int64)
    before, through = np.searchsorted(places, offsets[:, 0]), np.searchsorted(places, offsets[:, 1])
    marks, length = through - before, offsets[:, 1] - offsets[:, 0]
    if np.any((marks > 0) & (marks < length)):
        raise _refused("the messages contain control tokens that this tokenizer cannot encode as text")
    kept = np.flatnonzero(marks == 0)
    moved = offsets[kept] - np.stack([before, through], axis=1)[kept]
    moved[length[kept] == 0] = 0
    return [tokens[index] for index in kept.tolist()], moved


def _refused(problem: str) -> RequestError:
    return RequestError(f"{problem}; remove them, or set control_tokens to 'parse'", fields="messages")
