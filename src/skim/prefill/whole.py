"""Questions about a whole text, of which no part holds the answer: a summary, a translation, a full list."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

FLAT = 0.5  # scores that are spread over this fraction of the blocks, or more, have found nothing

_TEXT = r"(?:text|document|book|story|article|file|passage|novel|report|transcript|paper|page|conversation)s?"
_IT = (
    r"(?:it|this|that|these|all|everything|(?:(?:all|the|this|following|above|whole|entire|full|complete)\s+)+"
    rf"(?:of\s+)?(?:{_TEXT})?)"
)
_GIST = (
    r"(?:summary|synopsis|overview|recap|gist|abstract|outline|translation|timeline|chronology|title|tl;?\s?dr"
    r"|(?:key|main|central|major|most\s+important)\s+(?:points?|ideas?|themes?|topics?|arguments?|messages?)"
    r"|takeaways|bullet\s+points)"
)
_POLITE = (
    r"(?:(?:please|now|then|first|and|also|kindly|(?:can|could|would|will)\s+you|i\s+(?:want|need)\s+you\s+to)"
    r"\W+)*"
)
_MAKE = (
    r"(?:give|write|make|provide|create|draft|produce|prepare|need|want|turn|suggest|show|list|extract"
    r"|return)"
)

_WHOLE = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"^{_POLITE}(?:summari[sz]e|translate|rewrite|re-write|rephrase|paraphrase|shorten|condense|simplify"
        r"|proofread|recap|outline|copy-?edit|tl;?\s?dr)\b",
        rf"^{_POLITE}(?:review|classify|describe|discuss|explain)\s+{_IT}\W*$",
        rf"^{_POLITE}{_MAKE}\b(?:\s+\S+){{0,6}}?\s+{_GIST}(?:\W*$|\s+(?:of|from|for|in|as|with|about)\s+(?!\w*'s\b)"
        rf"(?:{_IT}|(?:about\s+)?(?:\w+\s+)?\w+\s+(?:words|sentences|lines|points|paragraphs))\b)",
        rf"^(?:an?\s+|the\s+|in\s+)?(?:\w+\s+)?{_GIST}(?:\s+(?:of|for)\s+{_IT})?(?:,?\s+please)?\W*$",
        rf"\bwhat\s+(?:is|are|was|were)\s+the\s+{_GIST}(?:\W*$|\s+(?:of|in)\s+{_IT})",
        rf"\b(?:what|who)\s+(?:is|are|was|were)\s+{_IT}\s+(?:all\s+)?about\W*$",
        rf"\bwhat\s+(?:does|do|did)\s+{_IT}\s+(?:say|describe|cover|discuss|tell(?:\s+us)?)\W*$",
        rf"\bwhat\s+happens(?:\s+in\s+{_IT})?\W*$",
        rf"\b(?:tone|mood|style|sentiment|genre|structure)\s+of\s+(?:the\s+author|{_IT})",
        r"\b(?:which|what)\s+(?:topics|subjects|themes|issues)\s+(?:are|were)\s+(?:covered|discussed|mentioned)\b",
        rf"\bwhat\s+do\s+you\s+think\s+(?:of|about)\s+{_IT}\W*$",
        rf"\bhow\s+many\s+\w+\s+(?:does\s+{_IT}\s+(?:have|contain|mention)|are\s+(?:there|(?:named|mentioned)"
        rf"(?:\s+in\s+{_IT})?)|(?:appear|occur)(?:\s+in\s+{_IT})?)\W*$",
        r"\b(?:correct|fix|check)\s+all\b.*\b(?:spelling|grammar|mistakes|errors|typos)\b",
        r"\bfasse?\b.{0,60}\bzusammen|\bzusammenfass\w*|^übersetz\w*|^tradui\w+|^traduc\w+|^riassu\w+|^vat\b.*samen"
        r"|^résum(?:er|ez|ons)\b|\b(?:un|le)\s+résumé\s+(?:en|de|du)\b|^résum[eé]\s+(?:le|la|les|ce|cet|cette|moi)\b"
        r"|\b(?:un|el)\s+resumen\b|^resum(?:ir|a|o)\b|^resume\s+(?:el|la|los|las|este|esta|esto|o|os|as)\b",
        "总结|概括|摘要|翻译|要約|翻訳",
    )
]
_LISTS = re.compile(
    r"\b(?:list|name|find|give|extract|show|enumerate|collect|count)\s+(?:me\s+)?(?:all|every|each)\b(.*)",
    re.IGNORECASE,
)
_ONE_THING = re.compile(
    r"\b(?:that|which|who|whose|where|with|have|has|named|called|containing|about|of|for|by|from|to)\b",
    re.IGNORECASE,
)
_OF_THE_TEXT = re.compile(  # a clause that excludes nothing
    rf"\b(?:(?:that|which|who)\s+(?:{_IT}\s+(?:mentions|names|lists|contains|has)|(?:is|are)\s+(?:mentioned|named|listed)"
    rf"|appears?|occurs?)|(?:of|from)\s+{_IT}(?=\W*$))\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n+")


def asks_for_everything(question: str) -> bool:
    """True if the question needs the whole text: `Summarise this`, but not `Who wrote the summary?`"""
    for sentence in map(str.strip, _SENTENCE_END.split(question)):
        if any(pattern.search(sentence) for pattern in _WHOLE):
            return True
        if (listed := _LISTS.search(sentence)) and not _ONE_THING.search(_OF_THE_TEXT.sub("", listed[1])):
            return True
    return False


def spread(scores: Sequence[float]) -> float:
    """The fraction of blocks that the scores are spread over, by their entropy; 1 without any score."""
    found = np.maximum(np.array(scores, dtype=np.float64), 0.0)
    total = float(found.sum())
    if total <= 0:
        return 1.0
    shares = found / total
    shares = shares[shares > 0]
    return math.exp(-float((shares * np.log(shares)).sum())) / len(scores)
