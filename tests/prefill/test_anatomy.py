"""Anatomy of a prompt: pinned spans, the question, and prompts that cannot be mapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from skim.errors import RequestError
from skim.prefill.anatomy import (
    Anatomy,
    UnmappableError,
    map_chat,
    map_prompt,
    map_text,
    with_edges,
    with_results,
)
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
    edges = [0, *(edge for r in anatomy.pinned for edge in (r.start, r.stop)), len(anatomy.tokens)]
    gaps = [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return texts_of(gaps, rendered, encode)


def asked(anatomy: Anatomy, rendered: str, encode: Encode) -> str:
    """The question's texts, with bars between its places."""
    return " | ".join(texts_of(anatomy.question, rendered, encode))


def texts_of(tokens: Iterable[range], rendered: str, encode: Encode) -> list[str]:
    _, offsets = encode(rendered)
    return [rendered[offsets[run.start][0] : offsets[run.stop - 1][1]] for run in tokens]


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


def test_tool_definitions_and_calls_are_pinned_and_results_are_named() -> None:
    messages = [
        message("user", "What is in the log? " + DOCUMENT),
        message("assistant", "I shall look.", tool_calls=['{"name": "read_log"}']),
        message("tool", "The log says: " + DOCUMENT),
        message("tool", "It has 60 lines."),  # short: always kept
        message("assistant", DOCUMENT),
    ]
    rendered = chatml(messages, tools=f"<tools>{DOCUMENT}</tools>")
    anatomy = map_chat(messages, rendered, BYTES)
    log = "The log says: " + DOCUMENT
    assert skimmed(anatomy, rendered, BYTES) == [" " + DOCUMENT, log, DOCUMENT]
    assert asked(anatomy, rendered, BYTES) == "What is in the log?"
    assert texts_of([one.tokens for one in anatomy.results], rendered, BYTES) == [log]
    assert [one.age for one in anatomy.results] == [1]


def test_tool_results_inside_user_messages_are_named_and_are_not_the_question() -> None:
    result = f"<tool_response>{DOCUMENT} Why?</tool_response>"
    messages = [
        message("user", f"{DOCUMENT} So? {result} and {DOCUMENT}"),
        message("user", "Which ship is on line 9?"),
        message("assistant", 'Let me see. <tool_call>{"name": "look"}</tool_call> ' + DOCUMENT),
        message("user", f" {result}\n{result} "),
    ]
    rendered = chatml(messages)
    anatomy = map_chat(messages, rendered, BYTES)
    assert asked(anatomy, rendered, BYTES) == "Which ship is on line 9?"
    assert texts_of([one.tokens for one in anatomy.results], rendered, BYTES) == [result] * 3
    assert [one.age for one in anatomy.results] == [1, 0, 0]
    left = skimmed(with_results(anatomy, "keep"), rendered, BYTES)
    assert left == [f"{DOCUMENT} So? ", f" and {DOCUMENT}", " ", "\n", " "]


@pytest.mark.parametrize(("setting", "kept"), [("keep", "abc"), ("aged", "bc"), ("skim", "")])
def test_tool_results_are_pinned_as_the_setting_says(setting: str, kept: str) -> None:
    call = message("assistant", "Looking.", tool_calls=["{}"])
    messages = [message("user", "Which ship is on line 9?")]
    messages += [one for name in "abc" for one in (call, message("tool", f"{name} {DOCUMENT}"))]
    rendered = chatml(messages)
    anatomy = map_chat(messages, rendered, BYTES)
    left = skimmed(with_results(anatomy, setting), rendered, BYTES)
    assert left == [f"{name} {DOCUMENT}" for name in "abc" if name not in kept]
    assert_ranges(with_results(anatomy, setting))


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
    assert mapped(messages)[1] == word.strip()


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


def test_a_long_system_text_that_was_moved_may_be_skipped() -> None:
    messages = [
        message("system", DOCUMENT),
        message("user", "Hello."),
        message("assistant", "Hi."),
        message("user", "Which ship is on line 9?"),
    ]
    rendered = f"<s>[INST] Hello. [/INST] Hi.</s>[INST] {DOCUMENT}\n\nWhich ship is on line 9? [/INST]"
    anatomy = map_chat(messages, rendered, BYTES)
    assert skimmed(anatomy, rendered, BYTES) == ["Hello.", "Hi.", DOCUMENT]
    assert asked(anatomy, rendered, BYTES) == "Which ship is on line 9?"


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
    return mapped([message("user", content)], **options)[1]


def in_parts(*texts: str) -> tuple[list[dict[str, Any]], dict[int, list[range]]]:
    """One user message of these parts, and their places in it."""
    content, places = "", []
    for text in texts:
        places.append(range(len(content), len(content) + len(text)))
        content += text + "\n"
    return [message("user", content[:-1])], {0: places}


@pytest.mark.parametrize(
    ("end", "question"),
    [
        ("\n\nWhere is the key?", "Where is the key?"),
        ("\n \t\n  Where is the key?\nThe brass one.\n", "Where is the key?\nThe brass one."),
        ("\nWhere is the key?", "Where is the key?"),
        (" Where is the key?", "Where is the key?"),
        ("\n\nWhere is the key?\n\nBe brief.\n", "Where is the key?"),
        ("\n\nWhy?", "Why?"),
        ("\n\nName the captain.", "Name the captain."),
        ("\n\nthe captain", "the captain"),
        ("\n\n鍵はどこ\uff1f 答えて。", "鍵はどこ\uff1f 答えて。"),
    ],
)
def test_the_end_of_a_long_message_may_be_the_question(end: str, question: str) -> None:
    assert question_of(DOCUMENT + end) == question


@pytest.mark.parametrize("document", [DOCUMENT, f"<document>\n{DOCUMENT}\n</document>"])
def test_the_beginning_of_a_long_message_may_be_the_question(document: str) -> None:
    assert mapped([message("user", f"Where is the key?\n\n{document}")]) == (
        [f"\n\n{document}"],
        "Where is the key?",
    )


def test_an_answer_format_after_the_question_does_not_replace_it(real: Any) -> None:
    content = DOCUMENT + "\n\nWhich ship carries the salt?\n\nAnswer in one word."
    messages = [message("user", content)]
    rendered = chatml(messages)
    anatomy = map_chat(messages, rendered, encoder(real))
    assert asked(anatomy, rendered, encoder(real)) == "Which ship carries the salt?"
    assert skimmed(anatomy, rendered, encoder(real)) == [DOCUMENT + "\n\n"]  # the format is kept


def test_the_question_may_stand_in_the_system_message() -> None:
    messages = [message("system", "Be brief. Which ship carries the salt?"), message("user", DOCUMENT)]
    assert mapped(messages) == ([DOCUMENT], "Which ship carries the salt?")


@pytest.mark.parametrize("limit", [1024, 4096])
def test_a_long_system_message_may_be_skipped_except_its_instructions(limit: int) -> None:
    system = f"Answer from this log.\n\n{DOCUMENT}\n\nBe brief."
    messages = [message("system", system), message("user", "Which ship is on line 9?")]
    skipped = [f"\n\n{DOCUMENT}\n\n"] if limit == 1024 else []
    assert mapped(messages, system_limit=limit) == (skipped, "Which ship is on line 9?")


def test_a_question_may_stand_in_several_places() -> None:
    content = f"Where is the key?\n\n{DOCUMENT}\n\nWhere is it?\n\nAnd who has the map?"
    assert question_of(content) == "Where is the key? | Where is it?\n\nAnd who has the map?"


@pytest.mark.parametrize("content", ["x" * 500, DOCUMENT, f"{DOCUMENT}\n\n{DOCUMENT}"])
def test_a_text_that_does_not_ask_has_no_question(content: str) -> None:
    assert question_of(content) == ""


def test_the_question_before_the_material_may_be_an_earlier_message() -> None:
    messages = [
        message("user", "Which ship carries the salt?"),
        message("assistant", "Please send me the log."),
        message("user", DOCUMENT),
    ]
    assert mapped(messages)[1] == "Which ship carries the salt?"


@pytest.mark.parametrize(
    ("last", "question"),
    [
        ("And the grain?", "Which ship carries the salt? | And the grain?"),
        ("Where was it built?", "Which ship carries the salt? | Where was it built?"),
        (
            "What is the name of the captain of the last ship?",
            "What is the name of the captain of the last ship?",
        ),
    ],
)
def test_a_question_of_few_words_takes_the_earlier_one_too(last: str, question: str) -> None:
    messages = [
        message("user", f"{DOCUMENT}\n\nWhich ship carries the salt?"),
        message("assistant", "The ninth."),
        message("user", last),
    ]
    assert mapped(messages)[1] == question


def test_a_short_message_is_the_question_without_its_instructions() -> None:
    assert mapped([message("user", "I lost the key.\n\nWhere is it? Be brief.")]) == (
        [],
        "I lost the key.\n\nWhere is it?",
    )
    assert question_of("Be brief.") == "Be brief."


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_short_part_is_the_question_and_long_parts_may_be_skipped(place: int) -> None:
    texts = [DOCUMENT, DOCUMENT]
    texts.insert(place, "First thing.\n\nSecond thing?")
    messages, parts = in_parts(*texts)
    left, found = mapped(messages, parts=parts)
    assert found == "First thing.\n\nSecond thing?"
    assert "".join(left).count(DOCUMENT) == 2


def test_the_last_part_is_the_question_even_if_a_document_quotes_it() -> None:
    messages, parts = in_parts(f"{DOCUMENT}\nWhy?\n{DOCUMENT}", "Why?")
    assert mapped(messages, parts=parts) == ([f"{DOCUMENT}\nWhy?\n{DOCUMENT}\n"], "Why?")


def test_parts_of_a_content_that_the_template_strips_are_found() -> None:
    messages, parts = in_parts(f" \n{DOCUMENT}", "Why? ")
    rendered = chatml([message("user", messages[0]["content"].strip())])
    anatomy = map_chat(messages, rendered, BYTES, parts=parts)
    assert asked(anatomy, rendered, BYTES) == "Why?"
    assert skimmed(anatomy, rendered, BYTES) == [DOCUMENT + "\n"]


def test_a_last_part_of_instructions_is_kept_whole() -> None:
    last = " ".join(f"Rule {i} holds." for i in range(30)) + "\n\nWhere is the key?"
    messages, parts = in_parts(DOCUMENT, last)
    left, question = mapped(messages, parts=parts)
    assert question == "Where is the key?"
    assert left == [DOCUMENT + "\n"]


def test_a_long_question_is_cut_to_the_sentences_that_ask() -> None:
    content = "There is a chest. " * 5 + "Where is the key? " + "It is small. " * 5 + "Who has it?"
    assert question_of(content, question_limit=40) == "Where is the key? | Who has it?"
    assert question_of(content, question_limit=20) == "Who has it?"
    assert question_of(content, question_limit=4) == " it?"


def test_a_short_first_paragraph_is_pinned_but_is_not_the_question() -> None:
    content = f"The log of a ship.\n\n{DOCUMENT}\n\nWhere is the key?"
    left, question = mapped([message("user", content)])
    assert left == [f"\n\n{DOCUMENT}\n\n"]
    assert question == "Where is the key?"


def test_a_long_first_paragraph_may_be_skipped_except_a_short_first_line() -> None:
    assert mapped([message("user", f"{DOCUMENT}\n\nWhy?")])[0] == [f"{DOCUMENT}\n\n"]
    left, _ = mapped([message("user", f"Read:\n{DOCUMENT}\n\nWhy?")])
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
    asked = set(chain(*anatomy.question))
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
    assert 1 <= sum(map(len, anatomy.question)) <= limit
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


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (f"Where is the key?\n\n{DOCUMENT}", "Where is the key?"),
        (f"{DOCUMENT}\n\nQuestion: Where is the key?\nAnswer:", "Question: Where is the key?"),
    ],
)
def test_a_raw_text_is_read_like_a_message(text: str, question: str) -> None:
    ids, _ = BYTES(text)
    anatomy = map_prompt([257, *ids], text, BYTES)  # with a token before the text
    assert anatomy is not None
    shifted = [range(run.start - 1, run.stop - 1) for run in anatomy.question]
    assert texts_of(shifted, text, BYTES) == [question]
    assert anatomy.pinned[0].start == 0
    assert_ranges(anatomy)


@pytest.mark.parametrize("text", ["Where is the key?", DOCUMENT])
def test_a_raw_text_that_is_short_or_does_not_ask_is_left_to_its_tail(text: str) -> None:
    assert map_prompt(BYTES(text)[0], text, BYTES) is None
    assert map_prompt([1, 2, 3], f"Why?\n\n{DOCUMENT}", BYTES) is None  # other tokens than the text's


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
