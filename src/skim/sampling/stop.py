"""Tokens to text as they come, and stop strings within that text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_UNKNOWN = "\ufffd"
_UNSETTLED = 3  # an unfinished UTF-8 character is at most three bytes, and shows as at most three U+FFFD
_LONGEST_CHAR = 4  # bytes, and so tokens, that one character may take
_WINDOW = 16  # tokens; twelve always hold three U+FFFD and a boundary between characters


def quick_decode(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, without what transformers does around it where that changes nothing.

    It is called for every token of every row, often with one token, whose text is remembered.
    """
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
    """Token ids in, text out, without decoding everything again for every token.

    Only a window of recent tokens is decoded: those whose text is still open, and before them a few whose
    text was given, as context (a SentencePiece decoder drops the space before its first token, a byte-level
    one needs the bytes a character began with). The window stays within a few tokens of `_WINDOW`.

    Promised for every decoder: text once given is never taken back; a character is not split; each token
    costs the same. What is held back is at most three U+FFFD at the end, or, where a decoder changes its
    mind about text already given, the last three tokens; so neither invalid bytes nor a U+FFFD the model
    really wrote stall the stream. Promised for decoders whose text is that of the tokens' joined bytes
    (byte-level BPE), whatever the ids: the pushes and the flush add up to `decode(all ids)`. A byte-fallback
    decoder shows a run of byte tokens with one bad byte in it as U+FFFD throughout; there, characters given
    before the bad byte came stay as they were.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first, such as the end of a prompt; their text is never given."""
        self._decode = decode
        self._window = list(context[-_WINDOW // 2 :])
        self._read = len(self._window)  # leading tokens of the window whose text was given in full
        self._base = decode(self._window) if self._window else ""  # their text
        self._given = self._base  # the part of the window's text that was given
        self._text = self._base  # the window's text

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, maybe none."""
        text = self._decode([*self._window, token_id])
        # Without text, as a skipped special token. Asked twice over: a decoder may drop one leading space.
        if text == self._text and not self._decode([token_id, token_id]):
            return ""
        self._window.append(token_id)
        self._text = text
        if not text.startswith(self._given):
            if len(self._window) - self._read < _LONGEST_CHAR:
                return ""
            self._restart()
        settled = self._release()
        if len(self._window) >= _WINDOW:
            self._shorten()
        return settled

    def flush(self) -> str:
        """All that is left, certain or not: an unfinished character shows as U+FFFD."""
        if not self._text.startswith(self._given):
            self._restart()
        left = self._text[len(self._given) :]
        self._window, self._read = [], 0
        self._base = self._given = self._text = ""
        return left

    def _release(self) -> str:
        open_end = len(self._text) - len(self._text.rstrip(_UNKNOWN))
        end = len(self._text) - min(open_end, _UNSETTLED)
        fresh = self._text[len(self._given) : end]
        self._given += fresh
        if open_end == 0 and fresh:
            self._rebase()
        return fresh

    def _rebase(self) -> None:
        """Everything was given: the tokens given last are context enough, unless alone they show nothing."""
        recent = self._window[self._read :]
        if text := self._decode(recent):
            self._window, self._text = recent, text
        self._read = len(self._window)
        self._base = self._given = self._text

    def _restart(self) -> None:
        """The decoder sees the given text differently now: stand by what was given, decode the rest alone."""
        given_since = len(self._given) - len(self._base)
        self._window = self._window[self._read :]
        self._read = 0
        self._base = ""
        self._text = self._decode(self._window)
        self._given = self._text[:given_since]

    def _shorten(self) -> None:
        """Cut the window between two characters, or where no such place is seen, before the last tokens.

        A place is between characters if both sides decode to the whole. A character cut in two never does,
        as long as there is text after the cut: its two halves show as more U+FFFD than the whole.
        """
        held = len(self._text) - len(self._given)
        for cut in range(len(self._window) - 1, 0, -1):
            tail = self._decode(self._window[cut:])
            if len(tail) > held and self._decode(self._window[:cut]) + tail == self._text:
                break
        else:
            cut = len(self._window) - _LONGEST_CHAR
            tail = self._decode(self._window[cut:])
        self._window = self._window[cut:]
        self._read = 0
        self._text = tail
        self._given = tail[: max(0, len(tail) - held)]
        self._base = ""


class StopChecker:
    """Finds stop strings in text that comes in pieces, and shows no text that may be the beginning of one.

    A match counts with the piece that completes it: no text is awaited that might complete a longer one.
    Among the matches complete by then the one that starts first wins, and the longest of those that start
    there.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """(text safe to show, the stop string found or None). After a match nothing more is shown.

        While not `active` a stop string that is complete counts as ordinary text; one that only begins may
        still be completed later.
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
        """The text still held back, once no more is to come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
