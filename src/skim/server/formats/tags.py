"""Tags in a reply: finding them in streamed text, and writing them into grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


class TagFinder:
    """Finds tags in text that arrives by character; holds back the possible beginning of one."""

    def __init__(self, tags: Iterable[str]) -> None:
        self._tags = tuple(tags)
        self._first = {tag[0] for tag in self._tags}
        self._held = ""

    def feed(self, char: str) -> tuple[str, str | None]:
        """(text that is no part of a tag, the tag that is complete or None)."""
        if not self._held and char not in self._first:
            return char, None
        held, cut = self._held + char, 0
        while not any(tag.startswith(held[cut:]) for tag in self._tags):
            cut += 1
        self._held = held[cut:]
        if self._held in self._tags:
            return held[:cut], self.flush()
        return held[:cut], None

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held


class TokenTags:
    """The tokens that a tokenizer has added to its vocabulary, by their texts.

    Grammars match such a token only as a token, and `skip_special_tokens` drops the special ones.
    """

    def __init__(self, tokenizer: Any = None, vocab_size: int | None = None) -> None:
        """Tokens beyond the model's `vocab_size` do not count: it cannot write them."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        if vocab_size is not None:
            added = {number: token for number, token in added.items() if number < vocab_size}
        self._ids: Mapping[str, int] = {str(token): number for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}

    def ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The tokens among `texts`."""
        return tuple(self._ids[text] for text in texts if text in self._ids)

    def special_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The special tokens among `texts`."""
        return tuple(number for number in self.ids(texts) if number in self._special)

    # -- grammars

    def literal(self, text: str) -> str:
        """A tag in a rule: its token if there is one, otherwise its text."""
        return f"<[{self._ids[text]}]>" if text in self._ids else json.dumps(text)

    def up_to(self, rule: str, text: str) -> list[str]:
        """Rules: `rule` matches any text up to a tag, and the tag."""
        if text not in self._ids:
            return [f"{rule}[lazy]: /(?s:.*){_pattern(text)}/"]
        terminal = f"{rule.upper()}_TEXT"
        return [f"{rule}: {terminal} {self.literal(text)}", without(terminal, text)]


def without(terminal: str, *tags: str) -> str:
    """The definition of a terminal that matches any text without these tags."""
    excluded = "".join(f" & ~/(?s:.*{_pattern(tag)}.*)/" for tag in tags)
    return f"{terminal}: /(?s:.*)/{excluded}"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
