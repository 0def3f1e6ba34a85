"""Incremental detokenization, and stop strings in its text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

_UNKNOWN = "\ufffd"
_UNSETTLED = 3  # an incomplete UTF-8 character has at most three bytes and decodes to at most three U+FFFD
_MAX_CHAR = 4  # bytes, and therefore tokens, of one character
_MAX_TAIL = 16  # tokens; any twelve contain three U+FFFD and a boundary between characters


def quick_decode(
    tokenizer: Any, skip_special_tokens: bool, shown: Collection[int] = ()
) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, without transformers' wrapper where that changes nothing.

    It runs for every token of every row, often with a single token; the texts of single tokens are cached.
    Special tokens that are `shown` are never skipped.
    """
    if skip_special_tokens and shown:
        skipped = frozenset(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        skipped -= frozenset(shown)
        every = quick_decode(tokenizer, False)
        return lambda ids: every([token for token in ids if token not in skipped])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        backend = tokenizer

    @cache
    def text_of(token: int) -> str:
        return str(backend.decode([token], skip_special_tokens=skip_special_tokens))

    def decode(ids: list[int]) -> str:
        if len(ids) == 1:
            return text_of(ids[0])
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))

    return decode


class Detokenizer:
    """Turns token ids into text without decoding the whole sequence for every token.

    Only the tail of recent tokens is decoded: the tokens whose text is not final, after a few whose text was
    emitted. The latter are context: a SentencePiece decoder drops the space before its first token, and a
    byte-level decoder needs the first bytes of a character. The tail stays within a few tokens of
    `_MAX_TAIL`.

    Promised for every decoder: emitted text is never taken back, a character is never split, and the cost
    per token is constant. At most three U+FFFD at the end are held back, or the last three tokens if the
    decoder revises text that was emitted. So neither invalid bytes nor a U+FFFD written by the model stall
    the stream.

    Promised for byte-level BPE and any ids: the pushes and the flush add up to `decode(all ids)`. A
    byte-fallback decoder shows a run of byte tokens with one invalid byte as U+FFFD throughout; characters
    emitted before that byte stay as they were.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first, such as the end of a prompt; their text is not emitted."""
        self._decode = decode
        self._tail = list(context[-_MAX_TAIL // 2 :])
        self._read = len(self._tail)  # leading tokens of the tail whose text was emitted in full
        self._base = decode(self._tail) if self._tail else ""  # their text
        self._emitted = self._base  # the emitted part of the tail's text
        self._text = self._base  # the tail's text

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final with it, maybe none."""
        text = self._decode([*self._tail, token_id])
        # A token without text, such as a skipped special token. Decoded twice in a row, because a decoder may
        # drop one leading space.
        if text == self._text and not self._decode([token_id, token_id]):
            return ""
        self._tail.append(token_id)
        self._text = text
        if not text.startswith(self._emitted):
            if len(self._tail) - self._read < _MAX_CHAR:
                return ""
            self._restart()
        settled = self._release()
        if len(self._tail) >= _MAX_TAIL:
            self._shorten()
        return settled

    def flush(self) -> str:
        """The remaining text, final or not: an incomplete character shows as U+FFFD."""
        if not self._text.startswith(self._emitted):
            self._restart()
        left = self._text[len(self._emitted) :]
        self._tail, self._read = [], 0
        self._base = self._emitted = self._text = ""
        return left

    def _release(self) -> str:
        open_end = len(self._text) - len(self._text.rstrip(_UNKNOWN))
        end = len(self._text) - min(open_end, _UNSETTLED)
        fresh = self._text[len(self._emitted) : end]
        self._emitted += fresh
        if open_end == 0 and fresh:
            self._rebase()
        return fresh

    def _rebase(self) -> None:
        """All text was emitted: keep only the latest tokens as context, unless they have no text alone."""
        recent = self._tail[self._read :]
        if text := self._decode(recent):
            self._tail, self._text = recent, text
        self._read = len(self._tail)
        self._base = self._emitted = self._text

    def _restart(self) -> None:
        """The decoder revised emitted text: keep the emitted text, and decode the later tokens alone."""
        emitted_since = len(self._emitted) - len(self._base)
        self._tail = self._tail[self._read :]
        self._read = 0
        self._base = ""
        self._text = self._decode(self._tail)
        self._emitted = self._text[:emitted_since]

    def _shorten(self) -> None:
        """Cut the tail between two characters, or before its last tokens if no such place is found.

        A place is between characters if the texts of both sides add up to the whole. A character cut in two
        never passes, as long as text follows the cut: its halves decode to more U+FFFD than the whole.
        """
        held = len(self._text) - len(self._emitted)
        for cut in range(len(self._tail) - 1, 0, -1):
            rest = self._decode(self._tail[cut:])
            if len(rest) > held and self._decode(self._tail[:cut]) + rest == self._text:
                break
        else:
            cut = len(self._tail) - _MAX_CHAR
            rest = self._decode(self._tail[cut:])
        self._tail = self._tail[cut:]
        self._read = 0
        self._text = rest
        self._emitted = rest[: max(0, len(rest) - held)]
        self._base = ""


class StopChecker:
    """Finds stop strings in streamed text, and holds back text that may be the beginning of one.

    A match counts as soon as a piece completes it; it does not wait for a longer one.
    Among the complete matches the earliest start wins, then the longest.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """(text safe to emit, the stop string found or None). After a match no more text is emitted.

        While `active` is False, a complete stop string counts as ordinary text; a partial one may still be
        completed later.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stop:
            return text, None
        text = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found and active:
            at, _, self._matched = min(found)
            self._held = ""
            return text[: at + len(self._matched) if self._include else at], self._matched
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
