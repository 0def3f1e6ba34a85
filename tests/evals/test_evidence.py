"""The task `evidence`: pairs, agent transcripts, requests about a whole text, and counting long texts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.evals.counting import LONG, Counter
from skim.evals.haystack import Haystack
from skim.evals.messages import messages_of, renders_tools, text_of
from skim.evals.room import SLACK, Room, Turns
from skim.evals.task import Draw, Sample
from skim.evals.tasks.evidence import Evidence
from skim.evals.tasks.pairs import Pairs, choose, set_apart
from skim.evals.tasks.summary import REQUESTS
from skim.evals.tasks.transcript import FORMS, LATER, deal
from skim.measure.book import packaged_text
from skim.prefill.pairs import Kind, calibration, held_out

TASK = Evidence(packaged_text())


def count(text: str) -> int:
    return -(-len(text) // 4)


def said(turns: Turns) -> str:
    """All that a prompt says, without its template."""
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in turns[0]]
    return "\n".join(texts)


def draw(kind: str, number: int, *, context: int = 3000, seed: int = 0) -> Sample:
    room = Room(context, count, lambda turns: count(said(turns)))
    rng = random.Random(f"{kind}/{number}/{seed}")
    return TASK.draw(Draw(rng, number, seed, kind, None, room))


# -- pairs


@pytest.mark.parametrize("kind", Kind)
def test_every_held_out_pair_is_asked_before_one_is_repeated(kind: Kind) -> None:
    pairs = held_out(kind)
    asked = [choose(kind, number, seed=3) for number in range(2 * len(pairs))]
    assert set(asked[: len(pairs)]) == set(pairs)
    assert asked[len(pairs) :] == asked[: len(pairs)]
    assert not set(asked) & set(calibration(kind))
    assert [choose(kind, number, seed=4) for number in range(len(pairs))] != asked[: len(pairs)]


@pytest.mark.parametrize("kind", Kind)
def test_every_answer_is_recognized(kind: Kind) -> None:
    part = Pairs(Haystack(packaged_text()))
    for pair in held_out(kind):
        sample = Sample((), (pair.answer,), 32)
        assert part.grade(sample, f'It says: "{pair.answer}".') == {"score": 1}
        assert part.grade(sample, "I do not know.") == {"score": 0}


def test_passages_of_several_lines_stand_apart() -> None:
    assert set_apart("One line.") == "One line."
    assert set_apart("a = 1\nb = 2") == "\n\na = 1\nb = 2\n\n"
    for number in range(4):
        sample = draw("code", number)
        document = sample.turns[0][0]
        [pair] = [pair for pair in held_out(Kind.CODE) if pair.question == sample.turns[0][1]]
        assert f"\n\n{pair.passages[0]}\n\n" in document


def test_both_passages_of_a_pair_are_in_the_text() -> None:
    places = [[draw("two", n).turns[0][0].index(one) for one in draw("two", n).evidence] for n in range(16)]
    assert all(len(found) == 2 for found in places)
    assert len({first < second for first, second in places}) == 2, "in either order"


# -- agent transcripts


@given(number=st.integers(0, 40), context=st.integers(2000, 40_000))
@settings(max_examples=20)
def test_the_answer_is_in_an_old_tool_result(number: int, context: int) -> None:
    sample = draw("agent", number, context=context)
    assert context - SLACK <= count(said(sample.turns)) + sample.max_tokens <= context
    [(*messages, question)] = sample.turns
    assert [one["role"] for one in messages[:4]] == ["system", "user", "assistant", "tool"]
    assert [one["role"] for one in messages[-2:]] == ["tool", "assistant"]
    [evidence] = sample.evidence
    [home] = [index for index, one in enumerate(messages) if evidence in one["content"]]
    assert messages[home]["role"] == "tool"
    assert sum(one["role"] == "assistant" for one in messages[home:-1]) >= LATER
    form = FORMS[number % len(FORMS)]
    assert messages[home - 1]["tool_calls"][0]["function"]["name"] == form.tool
    assert question in {pair.question for pair in held_out(form.facts)}
    assert draw("agent", number, context=context) == sample


def test_lines_are_dealt_to_results_of_their_form_in_order() -> None:
    lines = [f"{form.mark}{number}" for number in range(4) for form in FORMS]
    assert deal(lines, 7) == [
        *(["[0"], ["#0", "#1"], ["page0", "page1"]),
        *(["[1"], ["#2", "#3"], ["page2", "page3"]),
        ["[2", "[3"],
    ]


class Templates:
    """Renders messages as the two kinds of chat templates do."""

    def __init__(self, tools: bool) -> None:
        self._tools = tools

    def render_chat(self, messages: Any) -> str:
        return "".join(f"<{one['role']}>{one['content']}{self._calls(one)}\n" for one in messages)

    def _calls(self, message: Any) -> str:
        return json.dumps(message.get("tool_calls", "")) if self._tools else ""


def test_a_template_with_tools_gets_calls_as_they_are() -> None:
    llm: Any = Templates(tools=True)
    sample = draw("agent", 0)
    *messages, last = messages_of(llm, sample.turns[0])
    assert renders_tools(llm)
    assert messages == list(sample.turns[0][:-1])
    assert last == {"role": "user", "content": [{"type": "text", "text": sample.turns[0][-1]}]}


def test_a_template_without_tools_gets_calls_as_text() -> None:
    llm: Any = Templates(tools=False)
    sample = draw("agent", 0)
    assert not renders_tools(llm)
    messages = messages_of(llm, sample.turns[0])
    assert {one["role"] for one in messages} == {"system", "user", "assistant"}
    call = '<tool_call>\n{"name": "read_log", "arguments": {"path": "worker-1.log"}}\n</tool_call>'
    assert messages[2] == {"role": "assistant", "content": call}
    assert messages[3]["content"].startswith("<tool_response>\n[")
    assert messages[3]["content"].endswith("\n</tool_response>")
    text = text_of(llm, sample.turns)
    assert text.count("<tool_response>") == text.count("<tool_call>") == text.count("</tool_call>")
    assert all(text.count(evidence) == 1 for evidence in sample.evidence)


def test_a_conversation_is_rendered_with_empty_replies() -> None:
    llm: Any = Templates(tools=False)
    text = text_of(llm, (("A text.", "First?"), ("Second?",)))
    assert text == "<user>A text.\nFirst?\n<assistant>\n<user>Second?\n"


# -- requests about the whole text


def test_every_request_about_the_whole_text_is_made() -> None:
    samples = [draw("summary", number) for number in range(len(REQUESTS))]
    assert len({request.words for request in REQUESTS}) == len(REQUESTS) == 20
    assert all(sample.whole and not sample.evidence and not sample.expected for sample in samples)
    after = {sample.turns[0][1] for sample in samples if len(sample.turns[0]) == 2}
    alone = [sample.turns[0][0] for sample in samples if len(sample.turns[0]) == 1]
    assert after == {request.words for request in REQUESTS if request.words and not request.before}
    first = [request.words for request in REQUESTS if request.before]
    assert sorted(sum(text.startswith(f"{words}\n\n") for text in alone) for words in first) == [1, 1, 1]
    assert len(alone) == len(first) + 1, "one text has no request"
    for sample in samples:
        assert 3000 - SLACK <= count(said(sample.turns)) + sample.max_tokens <= 3000
        assert TASK.grade(sample, "A whale.") == {}


# -- counting


def letters(text: str) -> int:
    return len(text.replace(" ", ""))


def test_a_long_text_is_counted_by_its_sentences() -> None:
    whole = []
    counter = Counter(lambda text: whole.append(text) or letters(text))
    text = "A whale swims.\nIt dives! Deep.\n\nWhy? " * (LONG // 30)
    assert counter.text(text) == letters(text)
    asked = len(whole)
    assert counter.text(text + "A whale swims.") == letters(text + "A whale swims.")
    assert max(map(len, whole[asked:]), default=0) < 100, "only the first text was counted as a whole"


def test_a_tokenizer_that_joins_sentences_counts_texts_as_a_whole() -> None:
    counter = Counter(lambda text: letters(text) - text.count(". I"))
    text = "A whale. It dives. " * (LONG // 15)
    expected = letters(text) - text.count(". I")
    assert counter.text(text) == counter.text(text) == expected
    assert counter.text("A whale. It dives. ") == letters("A whale. It dives. ") - 1


def test_kinds_of_other_tasks_are_graded_as_there() -> None:
    sample = draw("quote", 0)
    assert sample.kind == "quote"
    assert TASK.grade(sample, sample.expected[0]) == {"score": 1, "exact": 1}
    hops = draw("hops", 0)
    assert TASK.grade(hops, " ".join(hops.expected[:1])) == {"score": pytest.approx(0.2)}
