"""A reply that is printed as it is streamed, from a local or a remote model."""

from __future__ import annotations

from typing import NamedTuple

CUT = "cut off by --max-tokens or the model's context window"


class Piece(NamedTuple):
    """A further part of a reply, and its finish reason if it has ended."""

    text: str
    finish_reason: str | None = None  # stop, length or abort


class Reply:
    """The text so far, without surrounding white space; printed as it arrives unless `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.text = ""
        self.finish_reason = "abort"
        self._blank = ""  # trailing white space, printed once text follows it

    @property
    def was_cut(self) -> bool:
        return self.finish_reason == "length"

    def add(self, piece: Piece) -> None:
        new = self._blank + piece.text if self.text else piece.text.lstrip()
        body = new.rstrip()
        self._blank = new[len(body) :]
        self.text += body
        self.finish_reason = piece.finish_reason or self.finish_reason
        if body and not self.quiet:
            print(body, end="", flush=True)

    def end_line(self) -> None:
        """End the printed line, if any text was printed."""
        if self.text and not self.quiet:
            print(flush=True)
