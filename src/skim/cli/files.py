"""Arguments that are texts, and output files.

Arguments that are not UTF-8 are refused by name. Output files are checked before the work begins, and written
completely or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from skim.errors import RequestError, SkimError


def check_utf8(text: str, name: str) -> None:
    """Raise if the text has lone surrogates, which Python makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (character {error.start}); convert it, for example with iconv"
        ) from error


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
