"""Texts from users, and output files.

Texts that are not UTF-8 are refused by name. Output files are checked before the work begins, and written
completely or not at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from skim.errors import RequestError, SkimError


def check_utf8(text: str, name: str) -> None:
    """Raise if the text has lone surrogates, which Python makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (character {error.start}); convert it, for example with iconv"
        ) from error


class Source(NamedTuple):
    """The text of a file without the blank lines around it, and the number of its first line."""

    name: str
    text: str
    line: int


def read_text(file: str) -> str:
    """The text of a file, or of standard input if the file is `-`."""
    return read_source(file).text


def read_source(file: str) -> Source:
    """The same, with its name and its first line."""
    name = "standard input" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise RequestError("standard input (-) is closed; give a file, or a text on it")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        whole = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    text = whole.strip()
    if not text:
        raise RequestError(f"{name} is empty; give a file with some text in it")
    return Source(name, text, 1 + whole[: whole.index(text)].count("\n"))


def check_target(option: str, name: str | Path, inputs: Sequence[str] = ()) -> Path:
    """The resolved path of a writable file. Raises a RequestError that names `option`.

    `inputs` must not be overwritten. Links are followed, so that they stay links.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        raise RequestError(f"{option}: {path} is a directory; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise RequestError(f"{option}: {path} is not a regular file; give another name")
    path = path.resolve()
    if not path.parent.is_dir():
        raise RequestError(f"{option}: there is no directory {path.parent}; make it, or give another name")
    if not os.access(path.parent, os.W_OK):
        raise RequestError(f"{option}: the directory {path.parent} may not be written; give another name")
    if any(file != "-" and Path(file).resolve() == path for file in inputs):
        raise RequestError(f"{option}: {path} is one of the files to read; give another name")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write under a temporary name and rename, so that readers never see a partial file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except OSError as error:
        raise SkimError(
            f"cannot write {path}: {error.strerror}; free some space there, or give another name"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
