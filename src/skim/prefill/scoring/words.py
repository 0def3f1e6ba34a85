"""Text to words that can be compared: what the lexical scorer reads, without a model."""

from __future__ import annotations

import re

# Scripts written without spaces give a word per character; pairs of neighbours then do the work of words.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def words_of(text: str) -> list[str]:
    """The words of a text in order: lower case, split at everything that is neither letter nor digit."""
    return WORD.findall(text.lower())


# Words that ask or join and rarely tell passages apart. What else is common in a prompt, its own
# document frequencies say.
_FUNCTION_WORDS = frozenset(
    words_of(
        """a about all am an and any are as at be been but by can could did do does for from had has have he
        her here his how i if in into is it its me my no not of on or our please s she should so some t than
        that the their them then there these they this those to was we were what when where which who whom
        whose why will with would you your"""
    )
)


def stem(word: str) -> str:
    """One form for `office` and `offices`, `open`, `opened` and `opening`; "" for a function word.

    Deliberately light: a wrong merge costs a little precision, and words with a digit, which are codes,
    versions and years, are left as they are.
    """
    if word in _FUNCTION_WORDS:
        return ""
    if len(word) <= 3 or not word.isalpha():
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for suffix in ("ing", "ed", "ly"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word
