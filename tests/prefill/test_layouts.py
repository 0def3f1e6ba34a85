"""A fact in the middle of a long text is kept wherever the question stands, with the default model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skim import LLM
from skim.config import DEFAULT_MODEL, PrefillConfig
from skim.tokenization import encode_with_offsets
from tests import paths

BOOK = paths.BOOK.replace("\u2014", "-")
FORM = 'Answer in one short sentence.\nUse only the text above.\nReply as JSON: {"answer": "..."}'
KINDS = (  # a fact and its question
    ("The access code for the {} office is {}4817.", "What is the access code for the {} office?"),
    ("The harbour master of {} is Ingrid Solheim, aged {}1.", "Who is the harbour master of {}?"),
    ("The lighthouse of {} was painted {}6 times in green.", "What colour is the lighthouse of {}?"),
    ("The library of {} closes at a quarter to {}.", "When does the library of {} close?"),
    ("The mayor of {} keeps {} parrots in the town hall.", "Which birds does the mayor of {} keep?"),
)
PLACES = ("Oslo", "Lisbon", "Nairobi", "Quito", "Hanoi", "Bergen", "Turin", "Ghent")
FACTS = [
    (fact.format(place, number + 2), question.format(place))
    for number, place in enumerate(PLACES)
    for fact, question in KINDS
]
Conversation = list[dict[str, Any]]


def user(*texts: str) -> dict[str, Any]:
    if len(texts) == 1:
        return {"role": "user", "content": texts[0]}
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tagged(text: str) -> str:
    return f"<document>\n{text}\n</document>"


def ten_turns() -> Conversation:
    turns = [(user(f"Tell me about port {i}."), reply(f"Port {i} lies in a bay.")) for i in range(10)]
    return [message for turn in turns for message in turn]


def layouts(document: str, question: str) -> dict[str, Conversation]:
    """The same document and question, arranged in different ways."""
    other = passage(40, len(document) // 4)
    call = reply('<tool_call>\n{"name": "read_file"}\n</tool_call>')
    return {
        "last": [user(f"{document}\n\n{question}")],
        "second part": [user(document, question)],
        "first": [user(f"{question}\n\n{document}")],
        "first, tagged document": [user(f"{question}\n\n{tagged(document)}")],
        "system message": [system(f"You are a helpful assistant. {question}"), user(document)],
        "before its form": [user(f"{document}\n\n{question}\n{FORM}")],
        "document in the system message": [system(f"Answer from this text.\n\n{document}"), user(question)],
        "ten turns later": [user(document), reply("I have read it."), *ten_turns(), user(question)],
        "between documents": [user(f"{tagged(other)}\n\n{question}\n\n{tagged(document)}")],
        "tool result": [user(question), call, user(f"<tool_response>\n{document}\n</tool_response>")],
        "repeated": [user(f"{question}\n\n{document}\n\n{question}")],
    }


def passage(index: int, length: int) -> str:
    """Paragraphs of the book, another place for each index."""
    start = BOOK.index("\n\n", 5000 + 20_000 * index) + 2
    return BOOK[start : start + length].strip()


def document(index: int, fact: str, tokens: int) -> str:
    text = passage(index, 4 * tokens)
    middle = text.rindex(". ", 0, len(text) // 2) + 2
    return f"{text[:middle]}{fact} {text[middle:]}"


@pytest.fixture(scope="module")
def llm(default_model_dir: Path) -> Iterator[LLM]:
    """The default model by name: a directory has no shipped calibration."""
    with LLM(DEFAULT_MODEL, progress=False, kv_memory="64M") as llm:
        yield llm


def is_kept(llm: LLM, conversation: Conversation, fact: str, scorer: str) -> bool:
    """True if every token of the fact is in the plan for 1,000 tokens."""
    prefill = PrefillConfig(sparse_prefill="always", scorer=scorer, keep_tokens=1000)
    prompt, planned = llm.plan(conversation, prefill=prefill, max_tokens=64)
    assert planned.plan is not None, planned.problem
    assert prompt.text is not None
    start = prompt.text.index(fact)
    _, offsets = encode_with_offsets(llm.tokenizer, prompt.text)
    needed = {i for i, (a, b) in enumerate(offsets) if a < start + len(fact) and b > start}
    return needed <= set(planned.plan.token_indices())


def lost(llm: LLM, facts: int, tokens: int, scorer: str, *names: str) -> Counter[str]:
    """The number of facts that are not kept, by layout."""
    missed: Counter[str] = Counter()
    step = len(FACTS) // facts
    for index, (fact, question) in enumerate(FACTS[::step][:facts]):
        for name, conversation in layouts(document(index, fact, tokens), question).items():
            if not names or name in names:
                missed[name] += not is_kept(llm, conversation, fact, scorer)
    return missed


def test_a_fact_is_kept_in_every_layout(llm: LLM) -> None:
    assert +lost(llm, 3, 7000, "lexical") == Counter()


def test_a_fact_beyond_the_context_window_is_kept_in_every_layout(llm: LLM) -> None:
    assert +lost(llm, 1, 30_000, "lexical") == Counter()


def test_the_default_scorer_keeps_a_fact_asked_for_in_the_system_message(llm: LLM) -> None:
    assert +lost(llm, 1, 3000, PrefillConfig().scorer, "system message") == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [7000, 30_000])
def test_the_default_scorer_keeps_facts_in_every_layout(llm: LLM, tokens: int) -> None:
    missed = lost(llm, len(FACTS), tokens, PrefillConfig().scorer)
    assert max(missed.values()) <= 0.05 * len(FACTS), missed
