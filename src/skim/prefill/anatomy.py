"""A prompt's anatomy: the tokens that must be kept, the question, and the rest, which may be skimmed.

Knows chat templates only by their output, and nothing of scores.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skim.prefill.locate import (
    Message,
    UnmappableError,
    is_kept_whole,
    last_question,
    locate,
    tool_results,
)

__all__ = ["QUESTION_TOKENS", "Anatomy", "UnmappableError", "map_chat", "map_text", "with_edges"]

EncodeWithOffsets = Callable[[str], tuple[list[int], list[tuple[int, int]]]]

QUESTION_TOKENS = 256  # most tokens of a question
PART_TOKENS = 1024  # most tokens of a last message part that counts as the question
_INSTRUCTION_TOKENS = 64  # most tokens of a first paragraph that counts as an instruction
_BLANK_LINE, _NEWLINE = re.compile(r"\n[ \t\r]*\n\s*"), re.compile(r"\n\s*")
_QUESTION_MARKS = "?\uff1f\u061f"
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|[\u3002\uff01\uff1f]")  # with CJK punctuation


@dataclass(frozen=True)
class Anatomy:
    """A prompt's tokens, the ranges that must be kept, and the question."""

    tokens: tuple[int, ...]
    pinned: tuple[range, ...]  # ordered, disjoint, not adjacent; they include the question
    question: tuple[range, ...]  # ordered, disjoint; its places may be several, or none


def map_text(tokens: Sequence[int], tail_tokens: int) -> Anatomy:
    """Anatomy of raw text: the last `tail_tokens` tokens are the question."""
    if tail_tokens < 1:
        raise ValueError(f"tail_tokens must be at least 1, got {tail_tokens}")
    question = range(max(0, len(tokens) - tail_tokens), len(tokens))
    asked = _merged([question])
    return Anatomy(tuple(tokens), asked, asked)


def with_edges(anatomy: Anatomy, head_tokens: int, tail_tokens: int) -> Anatomy:
    """Pin the first `head_tokens` and the last `tail_tokens` of the prompt as well."""
    if head_tokens < 0 or tail_tokens < 0:
        raise ValueError(
            f"head_tokens and tail_tokens must be at least 0, got {head_tokens} and {tail_tokens}"
        )
    count = len(anatomy.tokens)
    edges = [range(min(head_tokens, count)), range(max(0, count - tail_tokens), count)]
    return replace(anatomy, pinned=_merged([*anatomy.pinned, *edges]))


def map_chat(
    messages: Sequence[Message],
    rendered: str,
    encode_with_offsets: EncodeWithOffsets,
    *,
    question_text: str | None = None,
    question_limit: int = QUESTION_TOKENS,
    part_limit: int = PART_TOKENS,
) -> Anatomy:
    """Anatomy of a conversation. Only user messages and replies without tool calls may be skimmed.

    `rendered` is the chat template's output for `messages`, whose contents are texts. `encode_with_offsets`
    returns its tokens and their character ranges. A token is pinned if it overlaps pinned text, or has no
    characters.

    The question is the last user message, or `question_text`, its last part, if it had several. If that has
    more than `question_limit` tokens, the question is its end: the last paragraphs, lines or sentences that
    fit. A part of up to `part_limit` tokens is still pinned whole; a longer one counts as a document. A short
    first paragraph above the question is pinned as an instruction. Raises `UnmappableError` if the parts of
    the prompt cannot be distinguished.
    """
    if question_limit < 1:
        raise ValueError(f"question_limit must be at least 1, got {question_limit}")
    places = locate(messages, rendered)
    asking = last_question(messages)
    said = places[asking]
    tokens, offsets = encode_with_offsets(rendered)
    if len(tokens) != len(offsets):
        raise ValueError(f"{len(tokens)} tokens came with {len(offsets)} offsets")
    text = _TokenizedText(rendered, offsets)

    whole = _part(rendered, said, question_text, asking)
    question = range(_question_start(text, whole, question_limit), whole.stop)
    bulk = [p for p, message in zip(places, messages, strict=True) if p and not is_kept_whole(message)]
    kept = [question]
    if question_text is not None and len(text.tokens_of(whole)) <= part_limit:
        kept.append(whole)
    for place in bulk:
        carried = tool_results(rendered[place.start : place.stop])
        kept.extend(range(place.start + r.start, place.start + r.stop) for r in carried)
    if said.start < question.start:
        kept.append(_instruction(text, range(said.start, question.start)))
    asked = text.tokens_of(question)
    if not asked:
        raise UnmappableError(f"no token stands for the question in message {asking}")
    skimmed = text.tokens_within(_without(bulk, _merged(kept)))
    pinned = _without([range(len(tokens))], skimmed)
    return Anatomy(tuple(tokens), _merged([*pinned, asked]), (asked,))


class _TokenizedText:
    """A text with the character ranges of its tokens."""

    def __init__(self, text: str, offsets: Sequence[tuple[int, int]]) -> None:
        self.text = text
        pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        self.starts, self.ends = pairs[:, 0], pairs[:, 1]

    def tokens_of(self, chars: range) -> range:
        """The tokens from the first to the last one that overlaps these characters."""
        touching = np.flatnonzero(
            (self.starts < chars.stop) & (self.ends > chars.start) & (self.starts < self.ends)
        )
        return range(int(touching[0]), int(touching[-1]) + 1) if len(touching) else range(0)

    def tokens_within(self, chars: Sequence[range]) -> list[range]:
        """Runs of tokens that lie entirely inside one of these ranges, which are ordered and disjoint."""
        if not chars:
            return []
        starts, ends = np.array([c.start for c in chars]), np.array([c.stop for c in chars])
        home = np.searchsorted(starts, self.starts, side="right") - 1
        inside = (home >= 0) & (self.ends <= ends[home]) & (self.starts < self.ends)
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
        return [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _part(rendered: str, said: range, question_text: str | None, message: int) -> range:
    """Characters of `question_text` in the last user message; the whole message if it is None."""
    if question_text is None:
        return said
    content = rendered[said.start : said.stop]
    wanted = question_text.strip()
    start = content.rfind(wanted)
    if start < 0 or not wanted:
        raise UnmappableError(f"the question's text is not in the content of message {message}")
    return range(said.start + start, said.start + start + len(wanted))


def _question_start(text: _TokenizedText, part: range, limit: int) -> int:
    """First character of the question: the start of the part if it fits `limit`, else a cut near its end.

    Takes the last cut that leaves enough text for a question, so that a final `Answer in one word.` is not
    taken for it. Without such a cut, the last `limit` tokens are the question.
    """
    tokens = text.tokens_of(part)
    if len(tokens) <= limit:
        return part.start
    ends = text.ends[tokens.start : tokens.stop].tolist()
    earliest = int(text.starts[tokens.stop - limit])
    for kind in (_BLANK_LINE, _NEWLINE, _SENTENCE_END):
        cuts = [match.end() for match in kind.finditer(text.text, earliest, part.stop)]
        for cut in reversed(cuts):
            size = len(ends) - bisect_right(ends, cut)
            asks = any(mark in text.text[cut : part.stop] for mark in _QUESTION_MARKS)
            if size >= (3 if asks else 8):
                return cut
    return earliest


def _instruction(text: _TokenizedText, before: range) -> range:
    """The first paragraph or line above the question if it is short, else an empty range."""
    for kind in (_BLANK_LINE, _NEWLINE):
        end = match.start() if (match := kind.search(text.text, before.start, before.stop)) else before.stop
        first = range(before.start, end)
        if len(text.tokens_of(first)) <= _INSTRUCTION_TOKENS:
            return first
    return range(before.start, before.start)


def _merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """The union of ranges, ordered. Ranges that touch are joined, empty ones dropped."""
    found: list[range] = []
    for one in sorted((r for r in ranges if r), key=lambda r: r.start):
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return tuple(found)


def _without(ranges: Sequence[range], holes: Sequence[range]) -> list[range]:
    """The parts of `ranges` outside `holes`; both are ordered and disjoint."""
    left: list[range] = []
    ahead = 0
    for one in ranges:
        start = one.start
        while ahead < len(holes) and holes[ahead].stop <= start:
            ahead += 1
        while ahead < len(holes) and holes[ahead].start < one.stop:
            left.append(range(start, holes[ahead].start))
            start = holes[ahead].stop
            if start > one.stop:
                break
            ahead += 1
        left.append(range(start, one.stop))
    return [r for r in left if r]
