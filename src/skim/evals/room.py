"""The token budget of a prompt, and documents that fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skim.errors import RequestError

Message = Mapping[str, Any]  # role, content and tool calls, as in OpenAI's API
Turn = tuple[Message | str, ...]  # messages if any, then the parts of the user's message
Turns = tuple[Turn, ...]
Built = TypeVar("Built", bound=Turns)

SLACK = 48  # most tokens left unfilled
LOOKAHEAD = 64  # pieces that do not fit and are skipped before one is cut


@dataclass(frozen=True)
class Room:
    """A context to fill with a prompt, as the chat template renders it, and the replies."""

    context: int
    count: Callable[[str], int]  # tokens in a text
    count_prompt: Callable[[Turns], int]  # tokens in the prompt of these turns, without replies

    def fill(
        self,
        pieces: Iterable[str],
        build: Callable[[Sequence[str]], Built],
        reserved: int,
        separator: str = " ",
    ) -> Built:
        """Build turns from as many pieces as fit, in order, leaving `reserved` tokens free.

        A piece that does not fit is skipped for a later, shorter one; if none fits, the first is cut between
        words. Prompt and reserve together have `context` - `SLACK` to `context` tokens.
        """
        budget = self.context - reserved
        left = budget - self.count_prompt(build([]))
        if left < 0:
            raise RequestError(
                f"a context of {self.context} tokens is too short: the prompt without any document and the "
                f"reply take {self.context - left}; raise --contexts"
            )
        source = iter(pieces)
        chosen: list[str] = []
        while left > SLACK:
            chosen += self._take(source, left, separator)
            left = budget - self.count_prompt(build(chosen))
            while left < 0:  # token counts of pieces do not add up exactly
                last = chosen.pop().rsplit(" ", 1)
                chosen += last[:-1]
                left = budget - self.count_prompt(build(chosen))
        return build(chosen)

    def _take(self, source: Iterator[str], left: int, separator: str) -> list[str]:
        """Take at least one piece, up to `left` tokens in all; cut the last one if needed."""
        found: list[str] = []
        skipped: list[str] = []
        for piece in source:
            cost = self.count(separator + piece)
            if cost <= left:
                found.append(piece)
                left -= cost
            else:
                skipped.append(piece)
            if left <= SLACK or len(skipped) == LOOKAHEAD:
                break
        if left > SLACK and skipped:
            found.append(self._cut(skipped[0], left, separator))
        if not found:
            raise RequestError(
                f"the source is too short to fill a context of {self.context} tokens: {left} are missing; "
                "give a longer --text or --data, or lower --contexts"
            )
        return found

    def _cut(self, piece: str, left: int, separator: str) -> str:
        """The longest run of the piece's first words that fits; at least one word."""
        words = piece.split(" ")
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(separator + " ".join(words[:middle])) <= left:
                low = middle
            else:
                high = middle - 1
        return " ".join(words[:low])
