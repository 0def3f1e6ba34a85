"""Lines of files in a prompt: the places that `skim plan` names beside its spans."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from skim.cli.documents import Source


@dataclass(frozen=True)
class Lines:
    """Lines `first` to `last` of a file."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")


class FileMap:
    """Maps characters of a prompt to lines of the files in it.

    `prompt` has the sources' texts in order. A source whose text the chat template changed has no lines.
    """

    def __init__(self, prompt: str = "", sources: Sequence[Source] = ()) -> None:
        self._newlines = [index for index, char in enumerate(prompt) if char == "\n"]
        self._places: list[tuple[range, Source]] = []
        cursor = 0
        for source in sources:
            start = prompt.find(source.text, cursor)
            if start >= 0:
                cursor = start + len(source.text)
                self._places.append((range(start, cursor), source))
        self._starts = [place.start for place, _ in self._places]
        self.sources = [source for _, source in self._places]

    def lines(self, start: int, end: int) -> list[Lines]:
        """The lines of files that have one of the characters `start` to `end`, exclusive."""
        found = []
        at = bisect_right(self._starts, start) - 1
        for place, source in itertools.islice(self._places, max(at, 0), None):
            if place.start >= end:
                break
            first, last = max(start, place.start), min(end, place.stop) - 1
            if first <= last:
                base = source.line - self._line(place.start)
                found.append(Lines(source.name, base + self._line(first), base + self._line(last)))
        return found

    def _line(self, at: int) -> int:
        return bisect_left(self._newlines, at)
