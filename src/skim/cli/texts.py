"""Texts from users: in files, on standard input, in arguments. Invalid UTF-8 is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

from skim.errors import RequestError


def check_utf8(text: str, name: str) -> None:
    """Raise if the text has lone surrogates, which Python makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (character {error.start}); convert it, for example with iconv"
        ) from error


def read_text(file: str) -> str:
    """The text of a file, or of standard input if the file is `-`."""
    name = "standard input" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise RequestError("standard input (-) is closed; give a file, or a text on it")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    if not text:
        raise RequestError(f"{name} is empty; give a file with some text in it")
    return text
