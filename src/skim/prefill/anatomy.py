"""A prompt's anatomy: the tokens that must be kept, the question, and the rest, which may be skimmed.

Maps the texts that `question.py` finds to tokens. Knows chat templates only by their output, and nothing of
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from skim.prefill.locate import (
    Message,
    UnmappableError,
    content_of,
    is_plain,
    is_result,
    is_system,
    last_question,
    locate,
    tool_results,
)
from skim.prefill.phrases import Saying
from skim.prefill.question import SHORT, Question, Said, Survey, choose, survey
from skim.tokenization import Offsets

__all__ = [
    "QUESTION_TOKENS",
    "Anatomy",
    "ToolResult",
    "UnmappableError",
    "map_chat",
    "map_prompt",
    "map_text",
    "with_edges",
    "with_results",
]

EncodeWithOffsets = Callable[[str], tuple[list[int], Offsets]]
Parts = Mapping[int, Sequence[range]]
"""By message: the places of its content parts in its content."""

QUESTION_TOKENS = 256  # most tokens of a question
SYSTEM_TOKENS = 1024  # most tokens of a system message that is kept whole
RESULT_TOKENS = 64  # most tokens of a tool result that is always kept
GAP_TOKENS = 2  # most tokens between two sentences of a question that belong to it
RECENT = 1  # assistant turns after which a tool result is still kept under `aged`


@dataclass(frozen=True)
class ToolResult:
    """The tokens of a tool's result, and the number of assistant turns that follow it."""

    tokens: range
    age: int


@dataclass(frozen=True)
class Anatomy:
    """A prompt's tokens, the ranges that must be kept, the question, and long tool results."""

    tokens: tuple[int, ...]
    pinned: tuple[range, ...]  # ordered, disjoint, not adjacent; they include the question
    question: tuple[range, ...]  # ordered, disjoint; its places may be several, or none
    results: tuple[ToolResult, ...] = ()  # ordered; not pinned: the planner decides


def map_text(tokens: Sequence[int], tail_tokens: int) -> Anatomy:
    """Anatomy of token ids: the last `tail_tokens` are the question."""
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


def with_results(anatomy: Anatomy, tool_results: str) -> Anatomy:
    """Pin tool results as the setting says: all (`keep`), none (`skim`), or the recent ones (`aged`)."""
    oldest = {"keep": len(anatomy.tokens), "aged": RECENT, "skim": -1}[tool_results]
    kept = [result.tokens for result in anatomy.results if result.age <= oldest]
    return replace(anatomy, pinned=_merged([*anatomy.pinned, *kept]))


def map_prompt(tokens: Sequence[int], text: str, encode_with_offsets: EncodeWithOffsets) -> Anatomy | None:
    """Anatomy of a plain text, as if it were a user's message. None if it is short or nothing in it asks.

    `tokens` are those of the prompt, which may begin and end with special tokens.
    """
    if len(tokens) <= SHORT:
        return None
    encoded, offsets = encode_with_offsets(text)
    before = _find(tuple(tokens), tuple(encoded))
    if before is None:
        return None
    after = len(tokens) - before - len(offsets)
    read = _TokenizedText(np.pad(np.asarray(offsets), ((before, after), (0, 0))))
    own = survey(text, chars_per_token=read.chars_per_token)
    chosen = choose(own, Survey(), Survey())
    if not chosen.own:
        return None
    question = _limited(read, chosen, QUESTION_TOKENS)
    skimmed = read.tokens_within(_without([range(len(text))], _merged(_kept_chars(chosen))))
    pinned = _without([range(len(tokens))], skimmed)
    return Anatomy(tuple(tokens), _merged([*pinned, *question]), question)


def map_chat(
    messages: Sequence[Message],
    rendered: str,
    encode_with_offsets: EncodeWithOffsets,
    *,
    parts: Parts | None = None,
    question_limit: int = QUESTION_TOKENS,
    system_limit: int = SYSTEM_TOKENS,
) -> Anatomy:
    """Anatomy of a conversation: its question, and the texts that may be skimmed.

    User messages, replies without tool calls, system messages of more than `system_limit` tokens and tool
    results may be skimmed, except the short texts among them that ask or instruct. `rendered` is the chat
    template's output for `messages`, whose contents are texts. `encode_with_offsets` returns its tokens and
    their character ranges. A token is pinned if it overlaps pinned text, or has no characters.

    The question has at most `question_limit` tokens, and none if nothing in the conversation asks. Raises
    `UnmappableError` if the parts of the prompt cannot be distinguished.
    """
    if question_limit < 1:
        raise ValueError(f"question_limit must be at least 1, got {question_limit}")
    places = locate(messages, rendered)
    asking = last_question(messages)
    tokens, offsets = encode_with_offsets(rendered)
    if len(tokens) != len(offsets):
        raise ValueError(f"{len(tokens)} tokens came with {len(offsets)} offsets")
    read = _TokenizedText(offsets)
    surveyor = _Conversation(messages, rendered, places, parts or {}, read.chars_per_token)

    own = surveyor.survey(asking)
    told = [index for index, message in enumerate(messages) if is_system(message) and places[index]]
    system = _joined([surveyor.survey(index) for index in told])
    chosen = choose(own, system, surveyor.earlier(asking))
    question = _limited(read, chosen, question_limit)

    results = surveyor.results()
    long = {index for index in told if len(read.tokens_of(places[index])) > system_limit}
    bulk = [
        place
        for index, (place, message) in enumerate(zip(places, messages, strict=True))
        if place and (is_plain(message) or index in long)
    ]
    kept = _merged([*_kept_chars(chosen), *(place for place, _ in results)])
    skimmed = read.tokens_within(_without(sorted(bulk, key=lambda place: place.start), kept))
    found = zip(
        read.tokens_in_each([place for place, _ in results]), (age for _, age in results), strict=True
    )
    long_results = tuple(ToolResult(run, age) for run, age in found if len(run) > RESULT_TOKENS)
    pinned = _without([range(len(tokens))], _merged([*skimmed, *(one.tokens for one in long_results)]))
    return Anatomy(tuple(tokens), _merged([*pinned, *question]), question, long_results)


class _Conversation:
    """The messages of a conversation and their places in the rendered text, in which all ranges count."""

    def __init__(
        self,
        messages: Sequence[Message],
        rendered: str,
        places: Sequence[range],
        parts: Parts,
        chars_per_token: float,
    ) -> None:
        self._messages = messages
        self._rendered = rendered
        self._places = places
        self._parts = parts
        self._chars_per_token = chars_per_token

    def survey(self, index: int) -> Survey:
        """Survey a message by its content parts, without the tool results in it."""
        place = self._places[index]
        text = self._rendered[place.start : place.stop]
        skipped = max(0, content_of(self._messages, index).find(text))  # templates may strip contents
        parts = [range(max(0, p.start - skipped), p.stop - skipped) for p in self._parts.get(index, ())]
        own = _without(parts or [range(len(text))], tool_results(text))
        if not own:
            return Survey()
        return survey(text, own, chars_per_token=self._chars_per_token).moved(place.start)

    def earlier(self, asking: int) -> Survey:
        """The nearest earlier user message that asks, and those that it refers to."""
        found: list[Survey] = []
        for index in reversed(range(asking)):
            if self._messages[index].get("role") == "user" and self._places[index]:
                one = self.survey(index)
                if one.asking():
                    found.append(one)
                    if not one.leans:
                        break
        return _joined(found[::-1])

    def results(self) -> list[tuple[range, int]]:
        """The places of tool results, in order, with their ages."""
        found: list[tuple[range, int]] = []
        age = 0
        for place, message in zip(reversed(self._places), reversed(self._messages), strict=True):
            age += message.get("role") == "assistant"
            if is_result(message) and place:
                found.append((place, age))
            elif message.get("role") == "user":
                inside = tool_results(self._rendered[place.start : place.stop])
                found += [(range(place.start + r.start, place.start + r.stop), age) for r in inside[::-1]]
        return found[::-1]


def _joined(surveys: Sequence[Survey]) -> Survey:
    return Survey(
        tuple(said for one in surveys for said in one.said),
        tuple(kept for one in surveys for kept in one.kept),
        tuple(edge for one in surveys for edge in one.edges),
        is_short=all(one.is_short for one in surveys),
    )


def _kept_chars(question: Question) -> list[range]:
    return [*question.kept, *(one.chars for one in (*question.own, *question.system, *question.earlier))]


def _limited(read: _TokenizedText, question: Question, limit: int) -> tuple[range, ...]:
    """The question's tokens, at most `limit`.

    The asking message comes first, sentences with a mark or label before others, the last ones before earlier
    ones. A first sentence that is too long is cut to its end. Runs with a few tokens in between are joined.
    """
    chosen: list[range] = []
    left = limit
    for group in (question.own, question.system, question.earlier):
        for one in sorted(group, key=_worth, reverse=True):
            run = read.tokens_of(one.chars)
            if len(run) > left and not chosen:
                run = run[-limit:]
            if run and len(run) <= left:
                chosen.append(run)
                left -= len(run) + GAP_TOKENS
    chosen.sort(key=lambda run: run.start)
    gaps = [range(a.stop, b.start) for a, b in pairwise(chosen) if b.start - a.stop <= GAP_TOKENS]
    return _merged([*chosen, *gaps])


def _worth(one: Said) -> tuple[Saying, int]:
    return min(one.saying, Saying.MARK), one.chars.start


class _TokenizedText:
    """The character ranges of a text's tokens."""

    def __init__(self, offsets: Offsets) -> None:
        pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        self.starts, self.ends = pairs[:, 0], pairs[:, 1]
        self._has_chars = self.starts < self.ends
        self._firsts, self._lasts = np.maximum.accumulate(self.starts), np.maximum.accumulate(self.ends)

    @property
    def chars_per_token(self) -> float:
        """Mean length of a token, from 1 to 4: junk may have longer ones, but no question has."""
        return min(4.0, max(1.0, float(self.ends.max(initial=0)) / max(1, len(self.ends))))

    def tokens_of(self, chars: range) -> range:
        """The tokens from the first to the last one that overlaps these characters."""
        first = int(np.searchsorted(self._lasts, chars.start, side="right"))
        end = int(np.searchsorted(self._firsts, chars.stop, side="left"))
        while end > first and not self._has_chars[end - 1]:
            end -= 1
        return range(first, end) if first < end and chars else range(0)

    def tokens_in_each(self, chars: Sequence[range]) -> list[range]:
        """For each of these ranges, which are ordered and disjoint, the tokens that lie entirely inside."""
        found = []
        for one in chars:
            run = self.tokens_of(one)
            start = run.start + bool(run and self.starts[run.start] < one.start)
            end = run.stop - bool(run and self.ends[run.stop - 1] > one.stop)
            found.append(range(start, max(start, end)))
        return found

    def tokens_within(self, chars: Sequence[range]) -> list[range]:
        """Runs of tokens that lie entirely inside one of these ranges, which are ordered and disjoint."""
        if not chars:
            return []
        starts, ends = np.array([c.start for c in chars]), np.array([c.stop for c in chars])
        home = np.searchsorted(starts, self.starts, side="right") - 1
        inside = (home >= 0) & (self.ends <= ends[home]) & (self.starts < self.ends)
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
        return [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _find(tokens: tuple[int, ...], inner: tuple[int, ...]) -> int | None:
    """The number of special tokens before `inner` in `tokens`; None if it is not there."""
    for before in range(min(4, len(tokens) - len(inner) + 1)):
        if tokens[before : before + len(inner)] == inner:
            return before
    return None


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
