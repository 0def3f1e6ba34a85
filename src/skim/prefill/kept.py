"""The texts that a plan keeps: of blocks, of spans, and of the messages of a conversation. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from skim.prefill.locate import Message, content_of, locate
from skim.prefill.plan import Plan, Span
from skim.tokenization import Offsets


def block_cuts(text: str, offsets: Offsets, block_size: int) -> list[int]:
    """The first character of each prompt block, and the end of the text.

    A character that two blocks share goes to the later one: blocks cannot be decoded one by one.
    """
    starts = offsets[::block_size, 0].tolist()
    return [0, *accumulate(starts[1:], max), len(text)]


@dataclass(frozen=True)
class KeptMessage:
    """A message's content as it is read: the kept pieces with gaps between them.

    Without any pieces, nothing of the content is read. `content` is None if the message has none.
    """

    content: str | None
    skipped: int = 0  # characters


class KeptTexts:
    """The texts of a plan for a prompt, whose `offsets` are the characters of its tokens."""

    def __init__(self, text: str, offsets: Offsets, plan: Plan) -> None:
        self._text = text
        self._plan = plan
        self._cuts = block_cuts(text, offsets, plan.block_size)

    def span(self, span: Span) -> str:
        chars = self._chars(range(span.start, span.end))
        return self._text[chars.start : chars.stop]

    def messages(self, messages: Sequence[Message], gap: str) -> list[KeptMessage]:
        """The messages, whose contents are texts, with `gap` in place of each run of skipped text.

        A content that cannot be found in the prompt belongs to the template, which is always kept.
        """
        runs = [self._chars(run) for run in self._plan.runs]
        found = []
        for index, place in enumerate(locate(messages, self._text)):
            if place:
                found.append(self._message(place, runs, gap))
            else:
                content = messages[index].get("content")
                found.append(KeptMessage(None if content is None else content_of(messages, index)))
        return found

    def _message(self, place: range, runs: Sequence[range], gap: str) -> KeptMessage:
        parts: list[str] = []
        end, kept = place.start, 0
        for run in runs:
            start, stop = max(run.start, place.start), min(run.stop, place.stop)
            if start < stop:
                parts += [gap] if start > end else []
                parts.append(self._text[start:stop])
                end, kept = stop, kept + stop - start
        parts += [gap] if end < place.stop else []
        return KeptMessage("".join(parts), len(place) - kept)

    def _chars(self, tokens: range) -> range:
        """The characters of a run of whole blocks; the last one may end with the prompt."""
        size = self._plan.block_size
        return range(self._cuts[tokens.start // size], self._cuts[-(-tokens.stop // size)])
