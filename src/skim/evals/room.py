"""How long a prompt may be, in the model's own tokens, and how a document is grown to fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from skim.errors import RequestError

Turns = tuple[tuple[str, ...], ...]

SLACK = 48  # tokens that may be left unfilled
LOOKAHEAD = 64  # pieces too long for what is left that are passed over before one is cut


@dataclass(frozen=True)
class Room:
    """A context to fill: with the prompt as the chat template renders it, and the replies."""

    context: int
    count: Callable[[str], int]  # tokens of a text
    count_prompt: Callable[[Turns], int]  # tokens of the prompt that these turns make, without replies

    def fill(
        self, pieces: Iterable[str], build: Callable[[Sequence[str]], Turns], reserved: int, joint: str = " "
    ) -> Turns:
        """The turns that `build` makes of as many pieces as fit, in their order, with `reserved` tokens left.

        A piece that is too long for the end is passed over for a shorter one; where none comes, it is cut
        between words. Prompt and reserve have at most `context` tokens, and at most `SLACK` fewer.
        """
        budget = self.context - reserved
        left = budget - self.count_prompt(build([]))
        if left < 0:
            raise RequestError(
                f"a context of {self.context} tokens is too short: without any document the prompt and the "
                f"reply have {self.context - left}; give a longer one to --contexts"
            )
        source = iter(pieces)
        chosen: list[str] = []
        while left > SLACK:
            chosen += self._some(source, left, joint)
            left = budget - self.count_prompt(build(chosen))
            while left < 0:  # counts of single pieces do not add up for every tokenizer
                last = chosen.pop().rsplit(" ", 1)
                chosen += last[:-1]
                left = budget - self.count_prompt(build(chosen))
        return build(chosen)

    def _some(self, source: Iterator[str], left: int, joint: str) -> list[str]:
        """Pieces that fill what is left, the last of them cut if need be; never none."""
        found: list[str] = []
        passed: list[str] = []
        for piece in source:
            cost = self.count(joint + piece)
            if cost <= left:
                found.append(piece)
                left -= cost
            else:
                passed.append(piece)
            if left <= SLACK or len(passed) == LOOKAHEAD:
                break
        if left > SLACK and passed:
            found.append(self._cut(passed[0], left, joint))
        if not found:
            raise RequestError(
                f"the source is too short to fill a context of {self.context} tokens: {left} are left; give "
                "a longer --text or --data, or a shorter context"
            )
        return found

    def _cut(self, piece: str, left: int, joint: str) -> str:
        """As many of the piece's first words as fit; at least one."""
        words = piece.split(" ")
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(joint + " ".join(words[:middle])) <= left:
                low = middle
            else:
                high = middle - 1
        return " ".join(words[:low])
