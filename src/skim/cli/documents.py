"""Texts from users: plain text in any encoding, PDF and HTML.

A file that is none of these is refused by name, or left out if only a directory or a pattern brought it.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from skim.cli.paths import STDIN, find_files
from skim.errors import RequestError, SkimError, first_line, missing_package

EXTRA = "documents"
_BOMS = {  # the longer of two that begin alike comes first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LOOK = 8192  # bytes that decide whether a file is binary
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")
_HTML = re.compile(rb"\s*(?:<!--(?:(?!-->).)*-->\s*)*(?:<!doctype html|<html)", re.IGNORECASE | re.DOTALL)
_HTML_ENDINGS = (".html", ".htm", ".xhtml")
_UNSEEN = ("script", "style", "noscript", "template", "head", "svg")


class Source(NamedTuple):
    """A text without the blank lines around it, its name, and the number of its first line."""

    name: str
    text: str
    line: int
    file: str = ""  # as it was found: `name` may be a page of it


class Unreadable(RequestError):
    """A file that has no text to read."""


def read_sources(names: Sequence[str], encoding: str | None = None) -> list[Source]:
    """The texts of files, directories and patterns. Says which files of directories were left out.

    Every page of a PDF file is a source. `encoding` is that of texts that do not state their own.
    """
    check_encoding(encoding)
    sources: list[Source] = []
    left_out: list[str] = []
    for file in find_files(names):
        try:
            sources += read_source(file.name, encoding)
        except Unreadable:
            if file.named:
                raise
            left_out.append(file.name)
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        count = "1 file" if len(left_out) == 1 else f"{len(left_out)} files"
        print(f"left out for lack of text: {count} ({shown})", file=sys.stderr)
    if not sources:
        raise RequestError(f"{', '.join(names)}: no file has a text; give a text, PDF or HTML file")
    return sources


def read_text(file: str) -> str:
    """The text of a file, or of standard input if the file is `-`."""
    return "\n\n".join(source.text for source in read_source(file))


def read_source(file: str, encoding: str | None = None) -> list[Source]:
    """The texts of one file: one, or one per page of a PDF file."""
    name = "standard input" if file == STDIN else file
    if file == STDIN and sys.stdin is None:
        raise RequestError("standard input (-) is closed; give a file, or a text on it")
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    if data.startswith(b"%PDF-"):
        pages = pdf_pages(data, name)
        several = len(pages) > 1
        named = [(f"{name} page {i}" if several else name, text) for i, text in enumerate(pages, 1)]
        found = [trimmed(page, text, file) for page, text in named]
        sources = [source for source in found if source.text]
        if not sources:
            raise Unreadable(f"{name} has no text, only pictures of it; recognise its text first (OCR)")
        return sources
    text = decode(data, name, encoding)
    if file.lower().endswith(_HTML_ENDINGS) or _HTML.match(data[:_LOOK]):
        text = html_text(text, name)
    source = trimmed(name, text, file)
    if not source.text:
        raise Unreadable(f"{name} is empty; give a file with some text in it")
    return [source]


def trimmed(name: str, whole: str, file: str) -> Source:
    text = whole.strip()
    return Source(name, text, 1 + whole[: whole.index(text)].count("\n"), file)


def decode(data: bytes, name: str, encoding: str | None = None) -> str:
    """The text of these bytes: by its byte order mark, as UTF-8, or in the encoding that fits best."""
    for mark, theirs in _BOMS.items():
        if data.startswith(mark):
            encoding = theirs
            break
    else:
        if encoding is None and _CONTROL.search(data[:_LOOK]):
            raise Unreadable(f"{name} is a binary file{_kind(data)}; give a text, PDF or HTML file")
    try:
        return data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        if encoding is not None:
            raise Unreadable(f"{name} is not a text in {encoding} (byte {error.start})") from error
    from charset_normalizer import from_bytes

    guess = from_bytes(data).best()
    if guess is None:
        raise Unreadable(f"{name} is not a text in a known encoding; name it with --encoding")
    print(f"{name}: read as {guess.encoding}; --encoding names another", file=sys.stderr)
    return data.decode(guess.encoding)


def _kind(data: bytes) -> str:
    """Names a common format, with a remedy."""
    if data.startswith(b"PK"):
        return " (an archive, or an Office file: save it as PDF or text)"
    return ""


def check_encoding(encoding: str | None) -> None:
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        raise RequestError(
            f"--encoding: {encoding} is unknown; give a name such as cp1252 or utf-16"
        ) from error


def pdf_pages(data: bytes, name: str) -> list[str]:
    """The text of each page of a PDF file."""
    try:
        import pypdf
    except ImportError as error:
        raise Unreadable(missing_package(f"{name} is a PDF file, and reading it", "pypdf", EXTRA)) from error
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable(f"{name} needs a password; save it without one")
        return [page.extract_text() for page in reader.pages]
    except SkimError:
        raise
    except Exception as error:  # a damaged file raises many kinds
        raise Unreadable(f"{name} is a damaged PDF file: {first_line(error)[:200]}; save it again") from error


def html_text(text: str, name: str) -> str:
    """The text that a browser would show, with headings, lists and tables as in Markdown."""
    try:
        from bs4 import BeautifulSoup
        from markdownify import MarkdownConverter
    except ImportError as error:
        needed = missing_package(f"{name} is an HTML file, and reading it", "markdownify", EXTRA)
        raise Unreadable(needed) from error
    soup = BeautifulSoup(text, "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title is not None else ""
    for unseen in soup.find_all(list(_UNSEEN)):
        unseen.decompose()
    converter = MarkdownConverter(
        heading_style="atx", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    shown = re.sub(r"\n{3,}", "\n\n", converter.convert_soup(soup)).strip()
    return f"{title}\n\n{shown}" if title and title not in shown[: 2 * len(title) + 8] else shown


def names_of(sources: Iterable[Source]) -> list[str]:
    """The files that were read, each once, whatever its number of pages."""
    return list(dict.fromkeys(source.file for source in sources))
