"""Layout of a text: blocks between tags or fences, paragraphs, lines and sentences near an edge.

Takes linear time for any text: only tags and fences are searched everywhere, and only so many of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from skim.prefill.phrases import sentences, trimmed

_Split = Callable[[str, range], list[range]]

MOST_BLOCKS = 4096
_MOST_TAGS = 100_000
_MOST_NAMES = 32
_INDENT = 16
_SEARCHED = 4  # times the longest short unit: the characters at an edge that are searched for units
_TAG = re.compile(r"<([A-Za-z][\w.:-]{0,40}+)(?:[ \t][^<>\n]{0,200}+)?+>")
_BLANK_LINE = re.compile(r"\n[ \t\r]*+\n\s*+")
_NEWLINE = re.compile(r"\n\s*+")
_QUESTION_TAGS = {"question", "questions", "query", "task", "request", "user_query", "user_question", "ask"}
_MATERIAL_TAGS = {
    *(
        "document",
        "documents",
        "doc",
        "docs",
        "context",
        "text",
        "passage",
        "source",
        "file",
        "article",
        "content",
    ),
    *("data", "email", "transcript", "code", "chunk", "result", "results", "tool_response", "tools", "html"),
}


@dataclass(frozen=True)
class Block:
    """Characters between two tags or fences, with these."""

    place: range
    inside: range
    tag: str  # "" for a fence

    @property
    def asks(self) -> bool:
        """True for `<question>` and the like."""
        return self.tag in _QUESTION_TAGS


def blocks_of(text: str, within: range, short: int, *, fences: bool = True) -> list[Block]:
    """The outermost blocks of material, and those that announce a question, in order.

    A tag opens a block at the start of a line, or right after another block. A block of an unknown name with
    at most `short` characters counts only if there are others of that name.
    """
    found: list[Block] = []
    names: dict[str, bool] = {}  # False: no closing tag is left
    at = within.start
    tag = _TAG.search(text, at, within.stop) if text.find("</", at, within.stop) >= 0 else None
    fence = _fence(text, at, within) if fences else -1
    for _ in range(_MOST_TAGS):
        if tag is not None and tag.start() < at:
            tag = _TAG.search(text, at, within.stop)
        if 0 <= fence < at:
            fence = _fence(text, at, within)
        if len(found) >= MOST_BLOCKS or (tag is None and fence < 0):
            break
        if fence >= 0 and (tag is None or fence < tag.start()):
            close = text.find("\n```", fence + 3, within.stop)
            if close < 0:
                fence = -1
                continue
            at = close + 4
            found.append(Block(range(fence, at), range(fence + 3, close), ""))
        elif tag is not None:
            at = tag.end()
            name = tag[1].lower()
            free = names.get(name, len(names) < _MOST_NAMES)
            if free and _opens(text, tag.start(), found[-1].place.stop if found else within.start):
                close = text.find(f"</{tag[1]}>", at, within.stop)
                names[name] = close >= 0
                if close >= 0:
                    inside, at = range(at, close), close + len(tag[1]) + 3
                    found.append(Block(range(tag.start(), at), inside, name))
    return _material(found, short)


def _fence(text: str, at: int, within: range) -> int:
    """The next fence at the start of a line, or -1."""
    if at == within.start and text.startswith("```", at):
        return at
    return text.find("\n```", max(at - 1, within.start), within.stop) + 1 or -1


def _opens(text: str, at: int, begin: int) -> bool:
    """True if only a few spaces stand between `at` and the start of its line, or `begin`."""
    before = text[max(begin, at - _INDENT) : at]
    return not before.rpartition("\n")[2].strip() and ("\n" in before or at - begin <= _INDENT)


def _material(blocks: list[Block], short: int) -> list[Block]:
    counts: dict[str, int] = {}
    for block in blocks:
        counts[block.tag] = counts.get(block.tag, 0) + 1
    return [
        block
        for block in blocks
        if block.asks
        or block.tag in _MATERIAL_TAGS
        or len(block.place) > short
        or (block.tag and counts[block.tag] > 1)
    ]


def between(within: range, blocks: list[Block]) -> list[range]:
    """The ranges outside the blocks."""
    cuts = [
        within.start,
        *(cut for block in blocks for cut in (block.place.start, block.place.stop)),
        within.stop,
    ]
    return [range(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


@dataclass(frozen=True)
class Edge:
    """Short units at one edge of a long text, the outermost first."""

    units: tuple[range, ...] = ()
    kind: Literal["paragraph", "line", "sentence"] = "paragraph"


def edge_of(text: str, within: range, short: int, *, leading: bool) -> Edge:
    """The paragraphs of at most `short` characters at an edge.

    If the first is longer, its lines. If the first of these is longer, its sentences.
    """
    place = trimmed(text, within)
    kinds: tuple[tuple[Literal["paragraph", "line", "sentence"], _Split], ...] = (
        ("paragraph", _split_at(_BLANK_LINE)),
        ("line", _split_at(_NEWLINE)),
        ("sentence", sentences),
    )
    for kind, split in kinds:
        units = _units(text, place, split, _SEARCHED * short, leading)
        if units and len(units[0]) <= short:
            return Edge(tuple(takewhile(lambda unit: len(unit) <= short, units)), kind)
        place = units[0] if units else place
    return Edge()


def _split_at(pattern: re.Pattern[str]) -> _Split:
    def split(text: str, within: range) -> list[range]:
        found, start = [], within.start
        for match in pattern.finditer(text, within.start, within.stop):
            found.append(range(start, match.start()))
            start = match.end()
        return [one for one in (trimmed(text, r) for r in (*found, range(start, within.stop))) if one]

    return split


def _units(text: str, within: range, split: _Split, most: int, leading: bool) -> list[range]:
    """The units in `most` characters at an edge, the outermost first."""
    if len(within) <= most:
        units = split(text, within)
        return units if leading else units[::-1]
    if leading:
        units = split(text, range(within.start, within.start + most))
    else:
        units = split(text, range(within.stop - most, within.stop))[::-1]
    return units[:-1] or units  # the innermost one may be cut
