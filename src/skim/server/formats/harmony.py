"""The frame of messages in OpenAI's harmony format, which gpt-oss writes: a header, a text, an end.

The prompt ends after `<|start|>assistant`, so the first header of a reply has no beginning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
LONGEST_HEADER = 240

_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=([\w.-]+)\s*)?"
    r"(?:<\|channel\|>(analysis|commentary|final)\s*(?:to=([\w.-]+)\s*)?)?"
    r"(?:<\|constrain\|>)?(?:json|code|text)?\s*<\|message\|>"
)


@dataclass(frozen=True)
class Header:
    """The channel of a message, and the function it calls, if any."""

    channel: str
    function: str | None


def read_header(text: str) -> Header | None:
    """The header that a text is, from its first tag through `<|message|>`; None if it is none."""
    found = _HEADER.fullmatch(text)
    if found is None:
        return None
    recipient = found[1] or found[3] or ""
    name = recipient.removeprefix("functions.")
    return Header(found[2] or "", name if name and name != recipient else None)


def may_continue(text: str) -> bool:
    """True if a text without `<|message|>` may still become a header."""
    return len(text) <= LONGEST_HEADER and not text.endswith(ENDS)
