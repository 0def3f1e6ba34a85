"""Kinds of sentences in a prompt: those that ask, those about the form of the answer, and the rest.

Judges by punctuation, labels and first words. Word lists cover English, and the usual labels and question
words of other languages. A sentence that matches none is plain, which is never an error.
"""

from __future__ import annotations

import re
from enum import IntEnum
from itertools import pairwise


class Saying(IntEnum):
    """The kind of a sentence. Kinds from `WORDS` upwards ask."""

    PLAIN = 0
    MANNER = 1  # tells how to answer: form, length, language, role
    WORDS = 2  # begins with a question word, or with a verb that asks for something
    MARK = 3  # has a question mark
    LABEL = 4  # announced as a question or task

    @property
    def asks(self) -> bool:
        return self >= Saying.WORDS


_CLOSERS = "\"'\u201d\u2019\u00bb)\\]}*_"
_WIDE_ENDS = "\u3002\uff01\uff1f\u061f\u06d4\u0964\u1367\u055e"  # no space needs to follow these
_SENTENCE = re.compile(rf"[.!?\u2026;\u037e]++[{_CLOSERS}]*+(?=\s|$)|[{_WIDE_ENDS}]++[{_CLOSERS}]*+|\n")
_GREEK = re.compile("[\u0370-\u03ff\u1f00-\u1fff]")
_MARK = re.compile(
    rf"[?\u037e](?=$|[\s<|{_CLOSERS}])|[\uff1f\u061f\u055e\u1367\u2047\u2048\u203d]|[か吗嗎][。.]?$"
)
_DECORATION = re.compile(r"(?:[\s#>*_\-\u2022(\[\"'\u201c\u00ab]++|\d{1,3}[.)]\s)*+")
_ABOVE = 4  # lines that show the width of a text
_MOST_ABOVE = 1000  # their characters
_CODE = re.compile(r"```|~~~|<\||[{}\[\]]|\"\w+\"\s*:")


def _one_of(listed: str) -> str:
    """A pattern for any phrase of a list, with any spaces and either apostrophe."""
    phrases = [r"\s+".join(phrase.split()).replace("'", "['\u2019]") for phrase in listed.split(",")]
    return f"(?:{'|'.join(phrases)})"


def _starting_with(listed: str) -> re.Pattern[str]:
    return re.compile(_one_of(listed) + r"(?!\w)", re.IGNORECASE)


_LABELS = """
    questions?, quer(?:y|ies), tasks?, requests?, problem, exercise, fragen?, aufgaben?, preguntas?, tareas?,
    consulta, domand[ae], compito, perguntas?, tarefas?, vraag, vragen, taak, fråga, uppgift, spørgsmål,
    opgave, spørsmål, oppgave, kysymys, tehtävä, pytani[ae], zadanie, otázka, úloha, soru, görev, tâche,
    demande, вопросы?, задача, задание, запрос, питання, запитання, ερώτηση, 问题, 問題, 提问, 質問, 任务,
    任務, 課題, 질문, 과제, سؤال, السؤال, שאלה, प्रश्न, सवाल, câu hỏi, pertanyaan, คำถาม"""
_LABEL_OPENERS = "my, the, your, our, user, user's, final, main, first, second, next, actual"
_LABEL = re.compile(
    rf"(?:{_one_of(_LABEL_OPENERS)}\s+)*{_one_of(_LABELS)}(?:\s*#?\d{{1,3}})?[*_\s]*(?:[:\uff1a][*_\s]*|$)",
    re.IGNORECASE,
)
_SHORT_LABEL = re.compile(r"[QF]\d{0,3}[*_]*\s*[:.)\uff1a]\s*")
_SPEAKER = re.compile(r"(?:user|human)\s*:\s*", re.IGNORECASE)
_MANNER_LABELS = """
    answers?, a, response, reply, output, result, assistant, format, notes?, rules?, instructions?, antwort,
    respuesta, réponse, risposta, resposta, antwoord, svar, ответ, 答案, 回答, 답변"""
_MANNER_LABEL = re.compile(
    rf"(?:(?:final|your|short)\s+)?{_one_of(_MANNER_LABELS)}[*_\s]*(?:format|style|rules)?[*_\s]*[:\uff1a][*_\s]*",
    re.IGNORECASE,
)
_POLITE = "please, kindly, now, then, so, also, and, but, first, finally, hi, hello, hey, dear \\w+, ok, okay"
_GROUNDS = "based on, given, using, from, according to, in, with, about, regarding, for, after reading"
_OPENING = re.compile(
    rf"(?:{_one_of(_POLITE)}\b[\s,.!]*+|"
    r"(?:i|we)(?:\s+(?:want|need|have|would\s+like)|['\u2019]d\s+like)(?:\s+you)?\s+(?=to\b)|to\s+|"
    r"your\s+(?:task|job|goal)\s+is(?:\s+to)?\s+|"
    rf"{_one_of(_GROUNDS)}\s[^,?]{{1,80}},\s*)+",
    re.IGNORECASE,
)
_MANNER = _starting_with(
    r"""answers?, answering, respond, reply, output, return, format, use, using, do not, don't, never, always,
    be, keep, make sure, make it, ensure, think, cite, limit, base, refer, read, consider, work, take, follow,
    stick, avoid, remember, note that, say, speak, stay, act, pretend, include, exclude, start, begin, end,
    (?:only|just) (?:the|use|answer|return|output|give|respond|reply|write|one),
    no (?:preamble|explanations?|comments?|introduction|markdown|more than|longer than|need to),
    (?:if|when|where) (?:you|your|the answer|the document|the text|it is not|there is no|unsure|in doubt),
    if not, when (?:answering|responding|replying), you (?:are|will|must|should|may|can|have|need), you're,
    your (?:answer|reply|response|output|role|job|task|goal), here's, here is, here are, below, above,
    the (?:following|document|text|passage|context|answer|reply|response|output|format), this is the,
    these are the, thanks?, let's, in (?:one|two|three|at most|no more|plain|short|json|english|bullet),
    with (?:one|a|no) (?:word|sentence|number|line|explanation), without (?:any|explanation|comment)"""
)
_ABOUT_THE_ANSWER = re.compile(
    r"(?:write|give|provide|state|put|present|show|explain|justify|describe|report)"
    r"(?:\s+(?:only|just|me|your|the|a|an|its|one|short|brief|final|single|direct)){0,6}"
    r"\s+(?:answers?|responses?|reply|reasoning|results?|output|work|steps|sentences?|words?|json)\b",
    re.IGNORECASE,
)
_ALSO_ASKS = re.compile(
    r"(?:\band|\bthen|,|:)\s+(?:then\s+)?(?:please\s+)?"
    + _one_of(
        """tell me, find, list, identify, extract, determine, name, summari[sz]e, count, compute, calculate,
        translate, compare, figure out, look up"""
    )
    + r"\b",
    re.IGNORECASE,
)
_QUESTION_WORDS = _starting_with(
    r"""what, what's, which, who, who's, whom, whose, why, how,
    where(?:'s| is| are| was| were| did| does| do| can), when (?:is|are|was|were|did|does|do|will|can),
    (?:is|are|was|were|does|do|did|can|could|would|should|will|has|have|had)
    (?:the|there|it|he|she|they|we|i|you|this|that|any|anyone),
    wer, wen, wem, wessen, was (?:ist|sind|war|hat|kostet|bedeutet|macht|steht), wie, wo, wohin, woher, wann,
    warum, wieso, welche[rsnm]?, wieviele?, qui, quoi, quel(?:le)?s?, où, quand, comment, combien, pourquoi,
    est-ce, qué, quién(?:es)?, cuál(?:es)?, cuándo, dónde, cómo, cuánt[oa]s?, por qué, quale, quali, quando,
    dove, quant[oaie], perché, quem, qual, quais, onde, quantos, wat, welke?, waar, wanneer, hoeveel, waarom,
    vad, vem, hur, vilken, hvad, hvem, hvor, hvornår, кто, что, где, когда, как, какой, какая, какое, какие,
    сколько, почему, зачем"""
)
_UNSPACED_WORDS = re.compile(
    _one_of("什么, 谁, 哪, 何, 誰, どこ, なぜ, いつ, どう, 怎, 为什么, 多少, 几, 무엇, 누구, 어디, 언제, 왜")
)
_REQUESTS = _starting_with(
    r"""find, list, name, tell (?:me|us), identify, extract, determine, summari[sz]e, explain, describe,
    compare, count, calculate, compute, translate, locate, look up, look for, search, show me, give me,
    report, check, verify, decide, figure out, work out, analy[sz]e, classify, rewrite, write, draft, quote,
    state, specify, mention, select, choose, pick, review, outline, discuss, evaluate, estimate, predict,
    define, recommend, suggest, provide, let me know, help me, get, know, understand, learn, nenne, finde,
    erkläre, beschreibe, sag mir, trouve[rz]?, donne[rz]?, explique[rz]?, résume[rz]?, encuentra, busca,
    explica, dime, trova, spiega, elenca, encontre, liste, noem, zoek, назови, найди, перечисли, объясни"""
)


def sentences(text: str, within: range) -> list[range]:
    """The sentences in a part of a text, without the spaces around them. A newline ends a sentence.

    Takes linear time. A semicolon ends a sentence only after Greek letters, where it is the question mark.
    """
    found: list[range] = []
    start = within.start
    for match in _SENTENCE.finditer(text, within.start, within.stop):
        first = match[0][0]
        if first == ";" and not _GREEK.match(text, match.start() - 1):
            continue
        if first == "." and text[start : match.start()].strip().isdigit():  # the number of a list item
            continue
        found.append(trimmed(text, range(start, match.end())))
        start = match.end()
    found.append(trimmed(text, range(start, within.stop)))
    return [one for one in found if one]


def trimmed(text: str, within: range) -> range:
    """The range without the spaces at its ends."""
    own = text[within.start : within.stop]
    start = within.start + len(own) - len(own.lstrip())
    return range(start, max(start, within.start + len(own.rstrip())))


def goes_on(text: str, at: int) -> bool:
    """True if the line that begins at `at` goes on with the sentence above, in a text wrapped at a width.

    In such a text, no line has room for the first word of the next.
    """
    *above, indent = text[max(0, at - _MOST_ABOVE) : at].split("\n")
    if indent.strip() or not text[at].islower():
        return False
    lines = [text[at : at + _MOST_ABOVE].partition("\n")[0]]
    for line in reversed(above[-_ABOVE:]):
        if not line.strip():
            break
        lines.insert(0, line.strip())
    if len(lines) < 3 or not (lines[-2][-1].isalpha() or lines[-2][-1] == ","):
        return False
    width = max(map(len, lines))
    return all(len(one) + 1 + len(after.split(None, 1)[0]) > width for one, after in pairwise(lines))


def is_label(sentence: str) -> bool:
    """True for a label or heading without a text, such as `## Question`. The next sentence belongs to it."""
    bare = _undecorated(sentence)
    label = _LABEL.match(bare)
    return label is not None and not bare[label.end() :].strip()


def saying_of(sentence: str) -> Saying:
    """The kind of one sentence."""
    bare = _undecorated(sentence)
    if speaker := _SPEAKER.match(bare):
        bare = bare[speaker.end() :]
    if not bare.strip():
        return Saying.PLAIN
    if label := _LABEL.match(bare):
        rest = bare[label.end() :]
        return Saying.MANNER if rest and _kind(rest) is Saying.MANNER else Saying.LABEL
    if label := _SHORT_LABEL.match(bare):
        return Saying.MARK if bare[label.end() :].strip() else Saying.PLAIN
    if label := _MANNER_LABEL.match(bare):
        return Saying.MARK if _has_mark(bare[label.end() :]) else Saying.MANNER
    return Saying.MANNER if _CODE.match(sentence) else _kind(bare)


def _kind(text: str) -> Saying:
    if _has_mark(text):
        return Saying.MARK
    bare = text[match.end() :] if (match := _OPENING.match(text)) else text
    if _QUESTION_WORDS.match(bare) or _UNSPACED_WORDS.match(bare):
        return Saying.WORDS
    if _MANNER.match(bare) or _MANNER.match(text) or _ABOUT_THE_ANSWER.match(bare):
        return Saying.WORDS if _ALSO_ASKS.search(bare) else Saying.MANNER
    return Saying.WORDS if _REQUESTS.match(bare) else Saying.PLAIN


def _undecorated(sentence: str) -> str:
    """The sentence without bullets, numbers, quotes and heading marks at its start."""
    match = _DECORATION.match(sentence)
    return sentence[match.end() :] if match else sentence


def _has_mark(text: str) -> bool:
    greek = text.endswith(";") and _GREEK.match(text, len(text) - 2) is not None
    return greek or _MARK.search(text) is not None
