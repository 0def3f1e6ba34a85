"""`<think>` tags in replies that always begin with reasoning, even if no opening tag was written.

For chat templates of R1 and its distillations that do not open the tag. Not chosen by itself.
"""

from __future__ import annotations

from skim.registry import ParserDeclaration
from skim.server.formats.reasoning_format import TaggedFormat

PARSER = ParserDeclaration(
    help="all text up to `</think>`, whether or not `<think>` was written; never chosen by itself",
    families="DeepSeek R1 with an early template",
    order=60,
)


class Format(TaggedFormat):
    opening, closing = "<think>", "</think>"
    special = (opening, closing)
    always = True
