"""Questions about a whole text, of which no part holds the answer: a summary, a translation, a full list."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

FLAT = 0.5  # a scorer that spreads its score over this fraction of the blocks, or more, has found nothing

_WHOLE = re.compile(
    r"""
    \b(?:
        summ[ae]r(?:y|ies|i[sz]e|i[sz]ing|i[sz]ation) | synopsis | abstract\ of | tl;?\ ?dr | overview
        | recap | gist | outline\ (?:of|the|this) | condense | shorten | paraphrase
        | (?:key|main|central|major)\ (?:points?|ideas?|themes?|topics?|arguments?|takeaways?|messages?|plot)
        | takeaways? | bullet\ points?
        | translat(?:e|ion) | rewrite | re-write | rephrase | proofread | copy-?edit | simplify
        | (?:list|name|find|give|extract|show|enumerate|collect|count)\ (?:me\ )?(?:all|every|each)\b
        | how\ many\ (?:chapters|times|people|characters|names|words|sections|pages|paragraphs)
        | (?:what|who)\ (?:is|are|was|were)\ (?:this|the)\ (?:whole\ )?
          (?:text|document|book|story|article|file|passage|novel|report|transcript)\ (?:all\ )?about
        | what\ (?:does|do|did)\ (?:this|the)\ (?:text|document|book|story|article|file|passage|report)
          \ (?:say|describe|cover|discuss|tell)
        | what\ happens\ in\ (?:this|the)\ | (?:tone|mood|style|sentiment|genre|structure)\ of\ (?:this|the)
        | (?:whole|entire|complete|full)\ (?:text|document|book|story|article|file)
        | classify\ (?:this|the) | review\ (?:this|the) | (?:write|give|suggest)\ (?:me\ )?(?:a|an)\ title
        | (?:which|what)\ (?:topics|subjects|themes|issues)\ (?:are|were)\ (?:covered|discussed|mentioned)
        | what\ do\ you\ think\ (?:of|about)\ (?:it|this|the\ (?:text|document|book|story|article))\b
        | (?:timeline|chronology)\ of\ (?:all|every\w*|the\ (?:text|document|book|story|article))\b
        | zusammenfass\w* | fasse?\b.{0,60}\bzusammen | übersetz\w* | tradui\w+ | traduc\w+
        | résum(?:er|ez|ons)\b | (?:un|en|le)\ résumé | résum[eé]\ (?:le|la|les|ce|cet|cette|moi)\b
        | resum(?:en|ir|a|o)\b | resume\ (?:el|la|los|las|este|esta|esto|o|os|as)\b
        | riassu\w+ | samenvat\w*
    )
    | 总结 | 概括 | 摘要 | 翻译 | 要約 | 翻訳
    """,
    re.IGNORECASE | re.VERBOSE,
)
_ONE_THING = re.compile(
    r"\b(?:that|which|who|whose|where|with|have|has|named|called|containing|about)\b", re.IGNORECASE
)
_OF_THE_TEXT = re.compile(  # a clause that excludes nothing
    r"\b(?:that|which|who)\s+(?:(?:it|(?:this|the)\s+(?:text|document|book|story|article|file|report))\s+"
    r"(?:mentions|names|lists|contains|has)|(?:is|are)\s+(?:mentioned|named|listed)|appears?|occurs?)\b",
    re.IGNORECASE,
)


def asks_for_everything(question: str) -> bool:
    """True if the question needs the whole text: `Summarise this`, but not `List all rooms with a piano`."""
    found = _WHOLE.search(question)
    if found is None:
        return False
    lists = re.match(
        r"(?:list|name|find|give|extract|show|enumerate|collect|count)\b", found[0], re.IGNORECASE
    )
    return not (lists and _ONE_THING.search(_OF_THE_TEXT.sub("", question[found.end() :])))


def spread(scores: Sequence[float]) -> float:
    """The fraction of blocks that the scores are spread over, by their entropy; 0 without any score."""
    total = math.fsum(max(score, 0.0) for score in scores)
    if total <= 0:
        return 0.0
    shares = [score / total for score in scores if score > 0]
    return math.exp(-math.fsum(share * math.log(share) for share in shares if share > 0)) / len(scores)
