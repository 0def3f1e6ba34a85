"""`<think>` tags, opened by the reply (Qwen3) or by the prompt (DeepSeek-R1, Qwen3-Thinking).

A prompt that ends with a closed pair, as `enable_thinking: false` makes it, means no reasoning.
"""

from __future__ import annotations

from skim.registry import ParserDeclaration
from skim.server.formats.reasoning_format import TaggedFormat

PARSER = ParserDeclaration(
    help="`<think>` tags; the prompt or the reply opens them",
    families="Qwen3, DeepSeek R1 and V3.1, GLM-4.5, SmolLM3 and others",
    template=r"</think>|<think>",
    order=50,
)


class Format(TaggedFormat):
    opening, closing = "<think>", "</think>"
    special = (opening, closing)
