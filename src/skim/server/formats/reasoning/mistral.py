"""`[THINK]` tags, which are special tokens of Mistral AI's tokenizers."""

from __future__ import annotations

from skim.registry import ParserDeclaration
from skim.server.formats.reasoning_format import TaggedFormat

PARSER = ParserDeclaration(help="`[THINK]` tags", families="Magistral", template=r"\[THINK\]", order=20)


class Format(TaggedFormat):
    opening, closing = "[THINK]", "[/THINK]"
    special = (opening, closing)
