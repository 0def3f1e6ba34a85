"""Every parser on replies of its family: the result does not depend on cuts, and no text is lost."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.registry import reasoning_parsers, tool_parsers
from skim.server.formats.deltas import ContentDelta, Delta, Parser, ReasoningDelta, ToolCallDelta
from skim.server.formats.dialect import reasoning_format, tool_format
from skim.server.formats.reply import ReplyParser
from tests.server.formats import reasoning_rows, tool_rows
from tests.server.formats.tool_rows import TOOLS

TOOL_ROWS, REASONING_ROWS = tool_rows.ROWS, reasoning_rows.ROWS
TOOL_CASES = [(name, case) for name, row in TOOL_ROWS.items() for case in row.replies]
REASONING_CASES = [(name, case) for name, row in REASONING_ROWS.items() for case in row.replies]


def feed(make: Callable[[], Parser], pieces: list[str]) -> list[Delta]:
    parser = make()
    return [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()]


def joined(deltas: list[Delta], ids: str = ".*") -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls). Checks what clients rely on: order, ids, and no empty deltas."""
    reasoning, content, calls, seen = "", "", [], set()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            assert delta.text
            reasoning += delta.text
        elif isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.id is not None:
            assert re.fullmatch(ids, delta.id)
            assert delta.id not in seen
            assert delta.index == len(calls)
            assert delta.name
            seen.add(delta.id)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.name is None
            assert delta.arguments
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return reasoning, content, calls


def test_every_parser_has_a_row() -> None:
    assert TOOL_ROWS.keys() == tool_parsers().keys()
    assert REASONING_ROWS.keys() == reasoning_parsers().keys()


def cuts_of(text: str) -> list[list[str]]:
    """The text whole, in characters, and in two pieces at every place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))]


@pytest.mark.parametrize(("name", "case"), TOOL_CASES)
def test_calls_of_recorded_replies_cut_at_every_character(name: str, case: str) -> None:
    row = TOOL_ROWS[name]
    text, content, calls = row.replies[case]
    form = tool_format(name)
    for pieces in cuts_of(text):
        assert joined(feed(lambda: form.parser(TOOLS), pieces), row.ids) == ("", content, calls)


@pytest.mark.parametrize(("name", "case"), REASONING_CASES)
def test_reasoning_of_recorded_replies_cut_at_every_character(name: str, case: str) -> None:
    prompt, text, reasoning, content = REASONING_ROWS[name].replies[case]
    form = reasoning_format(name)
    assert form is not None
    for pieces in cuts_of(text):
        assert joined(feed(lambda: form.parser(prompt), pieces)) == (reasoning, content, [])


PAIRS = [("think", "hermes"), ("think", "qwen3_coder"), ("deepseek_r1", "deepseek"), ("mistral", "mistral")]


@pytest.mark.parametrize(("thinks", "calls"), PAIRS)
def test_reasoning_comes_before_calls(thinks: str, calls: str) -> None:
    thought, form = reasoning_format(thinks), tool_format(calls)
    assert thought is not None
    opening, closing = thought.special
    for case, (text, content, found) in TOOL_ROWS[calls].replies.items():
        whole = f"{opening}\nHm, {form.call('now', {})}?\n{closing}\n\n{text}"
        for pieces in (list(whole), [whole]):
            parser = ReplyParser(thought.parser(""), form.parser(TOOLS))
            deltas = [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]
            reasoning = f"Hm, {form.call('now', {})}?"
            assert joined(deltas) == (reasoning, content.lstrip() if not found else content, found), case


@pytest.mark.parametrize("case", TOOL_ROWS["gpt_oss"].replies)
def test_harmony_calls_after_reasoning(case: str) -> None:
    text, content, calls = TOOL_ROWS["gpt_oss"].replies[case]
    if not calls:
        return
    header = text if text.startswith("<|channel|>") else f"<|channel|>final<|message|>{text}"
    whole = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}"
    if text.startswith(" to="):
        whole = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{text}"
    thought, form = reasoning_format("gpt_oss"), tool_format("gpt_oss")
    assert thought is not None
    for pieces in cuts_of(whole):
        parser = ReplyParser(thought.parser(""), form.parser(TOOLS))
        deltas = [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]
        assert joined(deltas) == ("Hm.", content, calls)


# --- random replies


def random_replies(pieces: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Replies of a family's pieces and of words, each of which occurs once."""
    choices = st.lists(st.one_of(st.sampled_from(pieces), st.none()), max_size=14)
    return choices.map(
        lambda found: "".join(one if one is not None else f"é{at}ß" for at, one in enumerate(found))
    )


def words(text: str) -> list[str]:
    return re.findall(r"é\d+ß", text)


def random_pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check(
    make: Callable[[], Parser], text: str, rng: random.Random
) -> tuple[str, str, list[tuple[str, str]]]:
    """Any cut gives the same, and every word comes back once."""
    found = joined(feed(make, [text]))
    assert found == joined(feed(make, list(text))) == joined(feed(make, random_pieces(text, rng)))
    reasoning, content, calls = found
    back = words(reasoning) + words(content) + [one for call in calls for part in call for one in words(part)]
    assert sorted(back) == sorted(words(text))
    return found


counts = pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])


@counts
@pytest.mark.parametrize("name", TOOL_ROWS)
def test_no_text_of_a_reply_is_lost_or_repeated(name: str, count: int) -> None:
    form = tool_format(name)

    @settings(max_examples=count)
    @given(text=random_replies(TOOL_ROWS[name].pieces), rng=st.randoms(use_true_random=False))
    def run(text: str, rng: random.Random) -> None:
        _, content, calls = check(lambda: form.parser(TOOLS), text, rng)
        if not calls:
            assert content == text

    run()


@counts
@pytest.mark.parametrize("name", REASONING_ROWS)
def test_no_text_of_reasoning_is_lost_or_repeated(name: str, count: int) -> None:
    form = reasoning_format(name)
    assert form is not None

    @settings(max_examples=count)
    @given(
        text=random_replies(REASONING_ROWS[name].pieces),
        rng=st.randoms(use_true_random=False),
        opened=st.booleans(),
    )
    def run(text: str, rng: random.Random, opened: bool) -> None:
        prompt = f"A: {form.special[0]}" if opened else "A:"
        check(lambda: form.parser(prompt), text, rng)

    run()


names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]))
scalars: dict[str, st.SearchStrategy[Any]] = {
    "string": texts,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(texts, max_size=2),
    "object": st.dictionaries(texts, st.integers(), max_size=2),
}


@st.composite
def made_calls(draw: st.DrawFn) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Names, types and values of calls."""
    found = []
    for name in draw(st.lists(names, max_size=3, unique=True)):
        kinds = draw(st.dictionaries(names, st.sampled_from(sorted(scalars)), max_size=3))
        found.append((name, kinds, {key: draw(scalars[kind]) for key, kind in kinds.items()}))
    return found


FORMS = [(name, template) for name, row in TOOL_ROWS.items() for template in row.templates]


@pytest.mark.parametrize(("name", "template"), FORMS)
@settings(max_examples=60, deadline=None)
@given(calls=made_calls())
def test_every_written_call_is_found(
    name: str, template: str, calls: list[tuple[str, dict[str, str], dict[str, Any]]]
) -> None:
    form = tool_format(name, template)
    tools = [
        tool_rows.tool(one, **{key: {"type": kind} for key, kind in kinds.items()}) for one, kinds, _ in calls
    ]
    if not calls:
        return
    text = form.calls([(one, values) for one, _, values in calls])
    _, content, found = joined(feed(lambda: form.parser(tools), [text]))
    assert content == ""
    assert [(one, json.loads(arguments)) for one, arguments in found] == [
        (one, values) for one, _, values in calls
    ]


@pytest.mark.parametrize("name", TOOL_ROWS)
def test_parsing_takes_linear_time(name: str) -> None:
    form = tool_format(name)
    long = form.call("edit", {"text": "x" * 100_000})
    _, _, [(_, arguments)] = joined(feed(lambda: form.parser(TOOLS), [long]))
    assert json.loads(arguments) == {"text": "x" * 100_000}
    for piece in TOOL_ROWS[name].pieces:
        evil = piece * 5_000
        joined(feed(lambda: form.parser(TOOLS), [evil]))


@pytest.mark.parametrize("name", TOOL_ROWS)
def test_arguments_are_streamed(name: str) -> None:
    form = tool_format(name)
    parser = form.parser(TOOLS)
    text = form.call("edit", {"text": "some words of a long text"})
    at = text.index("words")
    begun = parser.push(text[:at])
    assert [one.name for one in begun if isinstance(one, ToolCallDelta) and one.id] == ["edit"]
    [more] = parser.push("words of a ")
    assert isinstance(more, ToolCallDelta)
    assert more.arguments == "words of a "


def test_reasoning_is_streamed_and_its_tokens_are_counted() -> None:
    form = reasoning_format("think")
    assert form is not None
    parser = ReplyParser(form.parser("A:"), None)
    assert parser.push("<think>", 1) == []
    assert parser.push("\nLet me", 1) == [ReasoningDelta("Let me")]
    assert parser.push(" see", 1) == [ReasoningDelta(" see")]
    assert parser.push("\n", 1) == []
    assert parser.push("</think>", 1) == []
    assert parser.push("\n\n", 1) == []
    assert parser.push("Four", 1) == [ContentDelta("Four")]
    assert parser.finish() == []
    assert parser.reasoning_tokens == 5
