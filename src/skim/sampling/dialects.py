"""Regular expressions, choices and grammars of other projects in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from skim.sampling.schema import Schema, check_schemas, refused

MAX_GBNF_RULES = 256
MAX_GBNF_LENGTH = 32 * 1024
"""Larger GBNF grammars are refused: their conversion would take seconds."""

_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_HEADER = re.compile(r"\s*%llguidance\s*\{\s*\}")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_INLINE_SCHEMA = re.compile(r"%\s*json\b\s*")


def from_regex(pattern: str) -> str:
    r"""Text that matches a regular expression as a whole, in the syntax of Rust's crate `regex`.

    `\d` is a digit of ASCII, as peers have it.
    """
    try:
        from llguidance import regex_to_lark
    except ImportError as error:
        raise missing() from error
    return f"start: /{regex_to_lark(pattern, use_ascii='d')}/"


def from_choices(choices: Sequence[str]) -> str:
    """Exactly one of these texts."""
    if not choices:
        raise refused("a choice needs at least one text")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def from_grammar(text: str) -> str:
    """A grammar in Lark, or in llama.cpp's GBNF, whose rules are written with `::=`.

    Schemas in the text (`%json`) are checked like others.
    """
    lark = _HEADER.sub("", _from_gbnf(text) if _GBNF_RULE.search(text) else text, count=1)
    if "%llguidance" in lark:
        raise refused("%llguidance must be {} here: the server sets the options of a grammar")
    check_schemas(_inline_schemas(lark))
    return lark


def missing() -> Exception:
    return refused("grammars need the package llguidance, which is not installed: pip install llguidance")


def _from_gbnf(text: str) -> str:
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError as error:
        raise missing() from error
    rules = len(_GBNF_RULE.findall(text))
    if rules > MAX_GBNF_RULES or len(text) > MAX_GBNF_LENGTH:
        raise refused(
            f"the GBNF grammar has {rules} rules and {len(text)} characters; at most {MAX_GBNF_RULES} rules "
            f"and {MAX_GBNF_LENGTH} characters are supported"
        )
    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_plain, text)))
    except RecursionError:
        raise refused("the GBNF grammar nests too deep") from None
    except Exception as error:
        raise refused(f"the GBNF grammar cannot be read: {str(error)[:300]}") from error


def _plain(found: re.Match[str]) -> str:
    """An escape by number as the character itself, or by two digits; the converter misreads others."""
    if len(found[1]) == 1:
        return found[0]
    code = int(found[1][1:], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return found[0] if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)


def _inline_schemas(lark: str) -> list[Schema]:
    """The JSON schemas in a Lark grammar."""
    found: list[Schema] = []
    for match in _INLINE_SCHEMA.finditer(lark):
        try:
            found.append(json.JSONDecoder().raw_decode(lark, match.end())[0])
        except (ValueError, RecursionError) as error:
            raise refused(f"%json in the grammar is not followed by a JSON schema: {error}") from error
    return found
