"""A reply on its way to the terminal, whoever writes it."""

from __future__ import annotations

from typing import NamedTuple

CUT = "cut off by --max-tokens or the model's window"


class Piece(NamedTuple):
    """What came next of a reply, and how it ended if it did."""

    text: str
    finish_reason: str | None = None  # stop, length or abort


class Reply:
    """The text so far, without the blank space around it; printed as it comes unless `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.text = ""
        self.finish_reason = "abort"
        self._blank = ""  # it is printed only once something follows it

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
        """Whatever ended the reply, the next line begins at the left."""
        if self.text and not self.quiet:
            print(flush=True)
