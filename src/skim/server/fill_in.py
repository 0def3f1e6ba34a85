"""Fill-in-the-middle prompts: a text before and a text after what is to be written (`suffix`)."""

from __future__ import annotations

from typing import Any

from skim.errors import RequestError
from skim.llm import LLM, Prepared

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
)
"""Tokens before the prefix, before the suffix, and before the text that is generated."""


def middle_tokens(tokenizer: Any) -> tuple[int, int, int] | None:
    """The ids of a form that the tokenizer has, or None."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    for form in FORMS:
        found = tokenizer.convert_tokens_to_ids(list(form))
        if all(one is not None and one != unknown for one in found):
            return found[0], found[1], found[2]
    return None


def encode_middle(llm: LLM, prefix: str, suffix: str) -> Prepared:
    """The prompt that asks for the text between `prefix` and `suffix`."""
    marks = middle_tokens(llm.tokenizer)
    if marks is None:
        raise RequestError(
            "suffix is not supported by this model: its tokenizer has no fill-in-the-middle tokens; leave "
            "suffix out, or serve a model that has them",
            fields="suffix",
        )
    before, after, middle = marks
    left, right = (llm.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    return Prepared(None, (*llm.encode(""), before, *left, after, *right, middle))
