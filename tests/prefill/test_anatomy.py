"""Anatomy of a prompt: pinned spans, the question, and prompts that cannot be mapped."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from skim.errors import RequestError
from skim.prefill.anatomy import Anatomy, UnmappableError, map_chat, map_text, with_edges
from skim.prefill.locate import locate, tool_results
from skim.tokenization import encode_with_offsets
from tests import tiny

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]
DOCUMENT = " ".join(f"Line {i} tells of ship {i * 7} and its cargo." for i in range(60))


def encoder(tokenizer: Any) -> Encode:
    return partial(encode_with_offsets, tokenizer)


BYTES = encoder(tiny.tokenizer())


@pytest.fixture(scope="module")
def real(default_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir)


def message(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chatml(messages: list[dict[str, Any]], tools: str = "") -> str:
    """Qwen's chat format: tools in the system text, tool calls and results between tags."""
    text = f"<|im_start|>system\nYou may call functions to help the user.{tools}<|im_end|>\n" if tools else ""
    for one in messages:
        role, content = one["role"], one["content"] or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        content += "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in one.get("tool_calls", ()))
        text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def skimmed(anatomy: Anatomy, rendered: str, encode: Encode) -> list[str]:
    """The texts of the spans that are not pinned."""
    _, offsets = encode(rendered)
    edges = [0, *(edge for r in anatomy.pinned for edge in (r.start, r.stop)), len(anatomy.tokens)]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return [rendered[offsets[a][0] : offsets[b - 1][1]] for a, b in gaps]


def asked(anatomy: Anatomy, rendered: str, encode: Encode) -> str:
    _, offsets = encode(rendered)
    [question] = anatomy.question
    return rendered[offsets[question.start][0] : offsets[question.stop - 1][1]]


def mapped(messages: list[dict[str, Any]], *, tools: str = "", **options: Any) -> tuple[list[str], str]:
    """The texts that may be skipped and the question, with one token per byte."""
    rendered = chatml(messages, tools)
    anatomy = map_chat(messages, rendered, BYTES, **options)
    return skimmed(anatomy, rendered, BYTES), asked(anatomy, rendered, BYTES)


# -- conversations


def test_only_user_messages_and_plain_replies_may_be_skipped() -> None:
    messages = [
        message("system", "Be brief."),
        message("user", DOCUMENT),
        message("assistant", "Noted: " + DOCUMENT),
        message("user", "Which ship is on line 9?"),
    ]
    assert mapped(messages) == ([DOCUMENT, "Noted: " + DOCUMENT], "Which ship is on line 9?")


@pytest.mark.parametrize("system", [None, "Be brief. Überlege gut 🎉."])
def test_with_the_default_models_tokenizer_and_template(real: Any, system: str | None) -> None:
    document = "Grüße 🎉 aus Köln. " + DOCUMENT + " 完。"
    messages = [message("system", system)] if system else []
    messages += [
        message("user", document),
        message("assistant", "Gelesen 👍🏽."),
        message("user", "Wohin fährt Schiff 63? 🚢"),
    ]
    rendered = real.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encode = encoder(real)
    anatomy = map_chat(messages, rendered, encode)
    assert anatomy.tokens == tuple(encode(rendered)[0])
    assert skimmed(anatomy, rendered, encode) == [document, "Gelesen 👍🏽."]
    assert asked(anatomy, rendered, encode) == "Wohin fährt Schiff 63? 🚢"


def test_render_tiny_equals_the_tokenizers_chat_template() -> None:
    messages = [message("system", "s y s"), message("user", "hi 🎉\nthere"), message("assistant", "")]
    text = tiny.tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_tiny([(m["role"], m["content"]) for m in messages])[0] == text


def test_tool_definitions_calls_and_results_are_pinned() -> None:
    messages = [
        message("user", "What is in the log? " + DOCUMENT),
        message("assistant", "I shall look.", tool_calls=['{"name": "read_log"}']),
        message("tool", "The log says: " + DOCUMENT),
        message("assistant", DOCUMENT),
    ]
    assert mapped(messages, tools=f"<tools>{DOCUMENT}</tools>", question_limit=4096) == (
        [DOCUMENT],
        "What is in the log? " + DOCUMENT,
    )


def test_tool_results_inside_user_messages_are_pinned_and_are_not_the_question() -> None:
    result = f"<tool_response>{DOCUMENT}</tool_response>"
    messages = [
        message("user", f"{DOCUMENT} So? {result} and {DOCUMENT}"),
        message("user", "Which ship is on line 9?"),
        message("assistant", 'Let me see. <tool_call>{"name": "look"}</tool_call> ' + DOCUMENT),
        message("user", f" {result}\n{result} "),
    ]
    assert mapped(messages) == (
        [f"{DOCUMENT} So? ", f" and {DOCUMENT}", " ", "\n", " "],
        "Which ship is on line 9?",
    )


def test_repeated_contents_are_distinguished_by_their_order() -> None:
    messages = [
        message("system", "Go on."),
        message("user", "Go on."),
        message("assistant", "Go on."),
        message("user", "Go on."),
    ]
    rendered = chatml(messages)
    places = locate(messages, rendered)
    assert [rendered[p.start : p.stop] for p in places] == ["Go on."] * 4
    assert [rendered[: p.start].count("<|im_start|>") for p in places] == [1, 2, 3, 4]
    assert mapped(messages) == (["Go on.", "Go on."], "Go on.")


@pytest.mark.parametrize("word", ["user", "assistant", "start", "s", "<|im_start|>user\n", "<|im_end|>"])
def test_contents_that_look_like_the_template_are_located_correctly(word: str) -> None:
    messages = [message("user", word), message("assistant", word), message("user", word)]
    rendered = chatml(messages)
    for place, one in zip(locate(messages, rendered), messages, strict=True):
        assert rendered[: place.start].endswith(f"<|im_start|>{one['role']}\n")
    assert mapped(messages)[1] == word


def test_a_question_quoted_by_the_preamble_is_located_in_the_user_message() -> None:
    messages = [message("user", "You may call functions")]
    rendered = chatml(messages, tools=" ")
    assert locate(messages, rendered)[0].start == rendered.rindex("You may call")


def test_empty_contents_are_allowed() -> None:
    messages = [
        message("system", ""),
        message("user", DOCUMENT),
        message("assistant", None),
        message("assistant", "  \n "),
        message("user", "Why?"),
    ]
    assert mapped(messages) == ([DOCUMENT], "Why?")


def test_templates_may_strip_contents_and_drop_thoughts() -> None:
    messages = [
        message("user", f"\n  {DOCUMENT} \n"),
        message("assistant", f"<think>{DOCUMENT[:90]}</think>\n\n{DOCUMENT[90:]}\n"),
        message("user", " Why? "),
    ]
    shown = [message("user", DOCUMENT), message("assistant", DOCUMENT[90:]), message("user", "Why?")]
    rendered = chatml(shown)
    anatomy = map_chat(messages, rendered, BYTES)
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT, DOCUMENT[90:].strip()]
    assert asked(anatomy, rendered, BYTES) == "Why?"


def test_a_system_text_may_be_moved_to_the_last_user_message() -> None:
    """Mistral's templates do this. The system text is pinned at any place."""
    messages = [
        message("system", "Be brief."),
        message("user", DOCUMENT),
        message("assistant", "Read."),
        message("user", "Why?"),
    ]
    rendered = f"<s>[INST] {DOCUMENT} [/INST] Read.</s>[INST] Be brief.\n\nWhy? [/INST]"
    anatomy = map_chat(messages, rendered, BYTES)
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT, "Read."]
    assert asked(anatomy, rendered, BYTES) == "Why?"


def test_a_short_question_is_found_after_its_marker_if_the_system_text_was_moved() -> None:
    messages = [message("system", "Be brief."), message("user", DOCUMENT), message("user", "s")]
    rendered = f"<s>[INST] {DOCUMENT} [/INST]</s>[INST] Be brief.\n\ns [/INST]"
    assert locate(messages, rendered)[2].start == rendered.rindex("s [/INST]")


def test_messages_may_follow_each_other_without_a_separator() -> None:
    result = "<tool_response>42</tool_response>"
    messages = [message("user", DOCUMENT + result), message("user", f"{result}{DOCUMENT}\n\nWhy?")]
    rendered = "".join(m["content"] for m in messages)
    anatomy = map_chat(messages, rendered, BYTES, question_limit=40)
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT, f"{DOCUMENT}\n\n"]


def test_many_messages_without_markers_are_located_in_linear_time() -> None:
    messages = [message("user", f"{index} {'x' * 200}") for index in range(5000)]
    start = time.process_time()
    assert len(locate(messages, "".join(m["content"] for m in messages))) == 5000
    assert time.process_time() - start < 5


def test_pinned_contents_that_the_template_omits_cause_no_mismatch() -> None:
    messages = [
        message("user", DOCUMENT),
        message("assistant", "cargo", tool_calls=["{}"]),  # the template renders only the call
        message("tool", "ok"),
        message("user", "And what of the cargo? It is long."),
    ]
    rendered = chatml([messages[0], message("assistant", "", tool_calls=["{}"]), *messages[2:]])
    anatomy = map_chat(messages, rendered, BYTES)
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT]
    assert asked(anatomy, rendered, BYTES) == "And what of the cargo? It is long."


def test_a_template_with_other_role_names_is_mapped() -> None:
    question = "Is the assistant ok?"
    messages = [message("user", DOCUMENT), message("assistant", "ok"), message("user", question)]
    rendered = "".join(f"#{'QA'[m['role'] == 'assistant']}# {m['content']}\n" for m in messages) + "#A#"
    anatomy = map_chat(messages, rendered, BYTES)
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT, "ok"]
    assert asked(anatomy, rendered, BYTES) == question


# -- the question


def question_of(content: str, **options: Any) -> str:
    return mapped([message("user", content)], **{"question_limit": 40, **options})[1]


@pytest.mark.parametrize(
    ("end", "question"),
    [
        ("\n\nWhere is the key?", "Where is the key?"),
        ("\n \t\n  Where is the key?\nThe brass one.\n", "Where is the key?\nThe brass one.\n"),
        ("\nWhere is the key?", "Where is the key?"),
        (" Where is the key?", "Where is the key?"),
        ("\n\nWhere is the key?\n\nBe\n", "Where is the key?\n\nBe\n"),  # two letters are too short
        ("\n\nWhy?", "Why?"),
        ("\n\nName the captain.", "Name the captain."),
        ("\n\n鍵はどこ\uff1f 答えて。", "鍵はどこ\uff1f 答えて。"),
    ],
)
def test_the_end_of_a_long_message_is_the_question(end: str, question: str) -> None:
    assert question_of(DOCUMENT + end) == question


def test_an_answer_format_after_the_question_does_not_replace_it(real: Any) -> None:
    content = DOCUMENT + "\n\nWhich ship carries the salt?\n\nAnswer in one word."
    messages = [message("user", content)]
    rendered = chatml(messages)
    anatomy = map_chat(messages, rendered, encoder(real), question_limit=64)
    assert asked(anatomy, rendered, encoder(real)).startswith("Which ship")


def test_a_question_without_a_boundary_begins_at_the_limit() -> None:
    assert question_of("x" * 500) == "x" * 40


def test_a_message_within_the_limit_is_the_question() -> None:
    content = "Read this.\n\nIt is short."
    assert question_of(content) == content
    assert mapped([message("user", content)])[0] == []


def test_the_last_part_is_the_question_and_the_earlier_parts_may_be_skipped() -> None:
    question = "First thing.\n\nSecond thing?"
    messages = [message("user", f"{DOCUMENT}\n{DOCUMENT}\n{question}")]
    left, found = mapped(messages, question_text=question, question_limit=64)
    assert found == question
    assert left == [f"{DOCUMENT}\n{DOCUMENT}\n"]


def test_the_last_part_is_the_question_even_if_a_document_quotes_it() -> None:
    messages = [message("user", f"{DOCUMENT}\nWhy?\n{DOCUMENT}\nWhy?")]
    assert mapped(messages, question_text="Why?") == ([f"{DOCUMENT}\nWhy?\n{DOCUMENT}\n"], "Why?")


def test_a_long_last_part_is_pinned_and_its_end_is_the_question() -> None:
    last = DOCUMENT + "\n\nWhere is the key?"
    content = f"{DOCUMENT}\n{last}"
    limits = {"question_limit": 64, "part_limit": 4096}
    left, question = mapped([message("user", content)], question_text=last, **limits)
    assert question == "Where is the key?"
    assert left == [f"{DOCUMENT}\n"]


def test_a_last_part_too_long_for_a_question_may_be_skipped_except_its_end() -> None:
    last = DOCUMENT + "\n\nWhere is the key?"
    limits = {"question_limit": 64, "part_limit": 100}
    left, question = mapped([message("user", f"One.\n{last}")], question_text=last, **limits)
    assert question == "Where is the key?"
    assert left == [f"\n{DOCUMENT}\n\n"]


def test_a_short_first_paragraph_is_pinned_but_is_not_the_question() -> None:
    content = f"Use the log below.\n\n{DOCUMENT}\n\nWhere is the key?"
    left, question = mapped([message("user", content)], question_limit=40)
    assert left == [f"\n\n{DOCUMENT}\n\n"]
    assert question == "Where is the key?"


def test_a_long_first_paragraph_may_be_skipped_except_a_short_first_line() -> None:
    assert mapped([message("user", f"{DOCUMENT}\n\nWhy?")], question_limit=40)[0] == [f"{DOCUMENT}\n\n"]
    left, _ = mapped([message("user", f"Read:\n{DOCUMENT}\n\nWhy?")], question_limit=40)
    assert left == [f"\n{DOCUMENT}\n\n"]


# -- prompts that cannot be mapped


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([message("user", "lost"), message("user", "Why?")], r"message 0 \(user\)"),
        ([message("user", "Why?"), message("assistant", "lost")], r"message 1 \(assistant\)"),
        ([message("system", "Be brief.")], "no user message"),
        ([message("user", " ")], "no user message"),
        ([], "no user message"),
        ([message("user", [{"type": "text", "text": "Why?"}])], "message 0 is a list"),
    ],
)
def test_messages_that_cannot_be_located_are_refused_by_name(
    messages: list[dict[str, Any]], names: str
) -> None:
    shown = [m for m in messages if isinstance(m["content"], str) and m["content"] != "lost"]
    with pytest.raises(UnmappableError, match=names):
        map_chat(messages, chatml(shown), BYTES)
    assert issubclass(UnmappableError, RequestError)


def test_contents_in_another_order_are_refused() -> None:
    messages = [message("user", "alpha beta"), message("user", "gamma delta")]
    with pytest.raises(UnmappableError, match="message 1"):
        map_chat(messages, chatml(messages[::-1]), BYTES)


@pytest.mark.parametrize("text", ["another question", "", "  "])
def test_a_question_text_that_is_missing_is_refused(text: str) -> None:
    messages = [message("user", DOCUMENT)]
    with pytest.raises(UnmappableError, match="message 0"):
        map_chat(messages, chatml(messages), BYTES, question_text=text)


def test_tokens_and_offsets_must_agree() -> None:
    messages = [message("user", "Why?")]
    with pytest.raises(ValueError, match="2 tokens came with 1 offsets"):
        map_chat(messages, chatml(messages), lambda text: ([1, 2], [(0, 1)]))


def test_tokens_without_characters_are_pinned() -> None:
    messages = [message("user", DOCUMENT), message("user", "Why?")]
    rendered = chatml(messages)
    middle = rendered.index("ship 70")

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets = BYTES(text)
        return [*ids[:middle], 257, *ids[middle:]], [*offsets[:middle], (0, 0), *offsets[middle:]]

    assert range(middle, middle + 1) in map_chat(messages, rendered, encode).pinned


def test_unclosed_tags_are_searched_in_linear_time() -> None:
    assert tool_results("<tool_response>" * 200_000) == []


# -- any conversation

WORDS = ["user", "assistant", "system", "tool", "né", "🎉🚢", "完了", "alpha", "<s>", "</s>x", "7"]
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
SAID = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
ANYTHING = st.text(max_size=20).filter(str.strip)
NOT_AS_THE_TEMPLATE = ANYTHING.filter(lambda text: text[0] != ":" and not text[0].isspace())


def render_tiny(conversation: list[tuple[str, str]]) -> tuple[str, list[range]]:
    text, places = "", []
    for role, content in conversation:
        text += f"<s>{role}: "
        places.append(range(len(text), len(text) + len(content)))
        text += f"{content}\n"
    return text + "<s>assistant: ", places


@given(st.lists(st.tuples(ROLES, SAID), max_size=6), SAID)
def test_exactly_the_texts_of_users_and_replies_may_be_skipped(
    talk: list[tuple[str, str]], question: str
) -> None:
    conversation = [*talk, ("user", question)]
    rendered, places = render_tiny(conversation)
    anatomy = map_chat([message(*one) for one in conversation], rendered, BYTES)
    _, offsets = BYTES(rendered)
    bulk = [p for p, (role, _) in zip(places[:-1], talk, strict=True) if role in ("user", "assistant")]
    pinned = {token for tokens in anatomy.pinned for token in tokens}
    [asked] = anatomy.question
    for token, (start, end) in enumerate(offsets):
        assert (token not in pinned) == any(p.start <= start and end <= p.stop for p in bulk)
        assert (token in asked) == (start < places[-1].stop and end > places[-1].start)


@given(
    st.lists(st.tuples(ROLES, NOT_AS_THE_TEMPLATE), max_size=6),
    ANYTHING,
    st.integers(1, 12),
)
def test_any_text_is_mapped_and_system_text_is_pinned(
    talk: list[tuple[str, str]], question: str, limit: int
) -> None:
    conversation = [*talk, ("user", question)]
    rendered, places = render_tiny(conversation)
    anatomy = map_chat([message(*one) for one in conversation], rendered, BYTES, question_limit=limit)
    tokens, offsets = BYTES(rendered)
    assert anatomy.tokens == tuple(tokens)
    assert_ranges(anatomy)
    assert 1 <= sum(map(len, anatomy.question)) <= limit + 3  # the limit may be inside a four-byte character
    pinned = {token for run in anatomy.pinned for token in run}
    for place, (role, _) in zip(places, conversation, strict=True):
        if role in ("system", "tool"):
            for token, (start, end) in enumerate(offsets):
                assert token in pinned or end <= place.start or place.stop <= start


def assert_ranges(anatomy: Anatomy) -> None:
    assert all(r.start < r.stop and r.step == 1 for r in anatomy.pinned)
    assert all(a.stop < b.start for a, b in pairwise(anatomy.pinned))
    assert all(r.start >= 0 and r.stop <= len(anatomy.tokens) for r in anatomy.pinned)
    assert {token for run in anatomy.question for token in run} <= {
        token for run in anatomy.pinned for token in run
    }


# -- raw text and edges


def test_the_tail_of_a_raw_prompt_is_the_question() -> None:
    assert map_text(range(10), 3) == Anatomy(tuple(range(10)), (range(7, 10),), (range(7, 10),))
    assert map_text([5, 6], 99) == Anatomy((5, 6), (range(2),), (range(2),))
    with pytest.raises(ValueError, match="tail_tokens"):
        map_text([5, 6], 0)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_edges_are_added_to_the_pins(count: int, asking: int, head: int, tail: int) -> None:
    before = map_text(range(count), asking)
    after = with_edges(before, head, tail)
    assert_ranges(after)
    wanted = {*range(head), *range(count - tail, count), *chain(*before.question)} & set(range(count))
    assert {token for run in after.pinned for token in run} == wanted
    assert (after.tokens, after.question) == (before.tokens, before.question)


def test_edges_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        with_edges(map_text([1], 1), -1, 0)
