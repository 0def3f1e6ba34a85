"""Tools in a chat: parsing does not depend on chunks, and the prompt keeps everything a client sent."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from skim import LLM, SamplingParams
from skim.config import ServerConfig
from skim.config.declare import declared
from skim.errors import RequestError
from skim.registry import tool_parsers
from skim.sampling import Grammar, GrammarCompiler, Matcher
from skim.sampling.grammar import forbidden_tokens
from skim.server.formats.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from skim.server.formats.dialect import tool_format
from skim.server.formats.reply import ToolCall
from skim.server.formats.reply import gathered as parsed
from skim.server.tools import (
    HERMES,
    prepare_messages,
    template_uses_tools,
    tool_grammar,
)
from tests import tiny


def parse_tool_calls(text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """(content, calls) of a complete reply; content is None if the reply has only calls."""
    found = parsed(feed([text]))
    return found.content or (None if found.calls else ""), found.calls


def feed(pieces: list[str]) -> list[Delta]:
    parser = HERMES.parser()
    return [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()]


def gathered(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]); checks the order that clients rely on."""
    content, calls = "", []
    for delta in deltas:
        assert not isinstance(delta, ReasoningDelta)
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.id is not None:
            assert re.fullmatch("call_[0-9a-f]{24}", delta.id)
            assert delta.index == len(calls)
            assert delta.name
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.name is None
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "x"}]}}\n</tool_call>'
F = ("f", '{"a": [1, {"b": "x"}]}')

REPLIES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "no call": ("Hello there.\n", "Hello there.\n", []),
    "nothing": ("", "", []),
    "blank": (" \n ", " \n ", []),
    "one call": (CALL, "", [F]),
    "blank around it": (f"\n\n {CALL} \n", "", [F]),
    "content before": (f"I'll look.\n{CALL}\n", "I'll look.", [F]),
    "content after": (f"{CALL}\nThat is it.", "That is it.", [F]),
    "content between": (f"One.\n{CALL}\nTwo.\n{CALL}", "One.\n\nTwo.", [F, F]),
    "two calls": (f"{CALL}\n{CALL}", "", [F, F]),
    "two calls at once": (CALL + CALL, "", [F, F]),
    "no closing tag": ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "no closing tag between": (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "other members": (
        '<tool_call>{"id": 7, "name": "f", "x": [{}], "arguments": {}, "y": null}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "tags and brackets in strings": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}]\\"{"}}</tool_call>!',
        "!",
        [("f", '{"a": "</tool_call>}]\\"{"}')],
    ),
    "a name with escapes": ('<tool_call>{"name": "\\u0066\\n"}</tool_call>', "", [("f\n", "{}")]),
    "spaces kept in arguments": (
        '<tool_call>{"name":"f","arguments": { "a" :1.50 , "b":"é\\u00e9" } }</tool_call>',
        "",
        [("f", '{ "a" :1.50 , "b":"é\\u00e9" }')],
    ),
    "a line break in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("f", '{"a": "x\ny"}')],
    ),
    "arguments that are no object": (
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        "",
        [("f", "5")],
    ),
    "almost a tag": ("a <tool_call b <tool <", "a <tool_call b <tool <", []),
    "a tag inside a tag": (f"<tool_<tool_call>{CALL[11:]}", "<tool_", [F]),
    "text in tags": ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    "blank before text in tags": ("\n<tool_call> oops", "\n<tool_call> oops", []),
    "a tag twice": (f"<tool_call>\n{CALL}", "<tool_call>", [F]),
    "cut off in the tag": ("Hi <tool_c", "Hi <tool_c", []),
    "cut off after the tag": ("<tool_call>\n", "<tool_call>\n", []),
    "cut off in the name": ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "cut off in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "an empty name": ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    "a name that is no string": ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    "half a character": ('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    "keys without quotes": ("<tool_call>{name: 1}", "<tool_call>{name: 1}", []),
    "a list": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "a brace too few": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Done.',
        "Done.",
        [("f", '{"a": 1')],
    ),
    "brackets crossed": (
        '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>',
        "}}</tool_call>",
        [("f", '{"a": [1')],
    ),
    "text after the object": ('<tool_call>{"name": "f"} and so on', "and so on", [("f", "{}")]),
}


@pytest.mark.parametrize("name", REPLIES)
def test_content_and_calls_of_a_reply(name: str) -> None:
    text, content, calls = REPLIES[name]
    assert gathered(feed([text])) == (content, calls)
    assert gathered(feed(list(text))) == (content, calls)
    whole, parsed = parse_tool_calls(text)
    assert whole == (content or (None if calls else ""))
    assert [(call.name, call.arguments) for call in parsed] == calls
    assert len({call.id for call in parsed}) == len(calls)


pieces_of_replies = st.one_of(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', "{}", '{"a": "', '"}']
    ),
    st.sampled_from(["}", "\n", " ", '"', "\\", "{", "[", "]", ",", ":", "<", CALL, '"name"', "null", "12"]),
    st.text(max_size=4),
)
texts = st.lists(pieces_of_replies, max_size=12).map("".join)


@settings(max_examples=400)
@given(texts, st.randoms(use_true_random=False))
def test_parsing_does_not_depend_on_how_a_reply_is_cut(text: str, rng: random.Random) -> None:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = gathered(feed(pieces))
    assert found == gathered(feed([text])) == gathered(feed(list(text)))
    if not found[1]:
        assert found[0] == text


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values)), max_size=3))
def test_every_written_call_is_found(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n".join(HERMES.call(name, arguments) for name, arguments in calls)
    content, found = parse_tool_calls(text)
    assert content == (None if calls else "")
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_content_and_arguments_are_streamed() -> None:
    parser = HERMES.parser()
    assert parser.push("Let me ") == [ContentDelta("Let me")]
    assert parser.push("see: a < b") == [ContentDelta(" see: a < b")]
    assert parser.push(" <tool") == []
    [begun] = parser.push('_call>{"name": "f"')
    assert isinstance(begun, ToolCallDelta)
    assert (begun.index, begun.name, begun.arguments) == (0, "f", "")
    assert parser.push(', "arguments": {"city": "Par') == [ToolCallDelta(0, None, None, '{"city": "Par')]
    assert parser.push('is"}') == [ToolCallDelta(0, None, None, 'is"}')]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


def test_parsing_takes_linear_time() -> None:
    arguments = json.dumps({"text": "x" * 200_000})
    _, [call] = parse_tool_calls(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert call.arguments == arguments
    _, [call] = parse_tool_calls(f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>')
    assert call.arguments == arguments
    for evil in ('<tool_call>{"a": "' * 10_000, "\n" * 200_000, "<tool_call>" * 20_000, "<" * 200_000):
        assert parse_tool_calls(evil) == (evil, ())


# --- prompt

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"$ref": "#/$defs/Unit"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "now"}}
WITH_TOOLS = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
WITHOUT_TOOLS = "{% for m in messages %}{% set tools = 1 %}{{ m.content }}{% endfor %}"
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Paris and Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{city}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city, "unit": "C"})},
            }
            for city in ("Paris", "Rome")
        ],
    },
    {"role": "tool", "tool_call_id": "call_Paris", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "call_Rome", "content": [{"type": "text", "text": "21 degrees"}]},
    {"role": "assistant", "content": "12 and 21."},
    {"role": "user", "content": "Thanks!"},
]


def test_a_template_with_tool_support_gets_tools_and_arguments_as_objects() -> None:
    before = json.dumps(HISTORY)
    messages, tools = prepare_messages(HISTORY, [WEATHER], WITH_TOOLS)
    assert tools == [WEATHER]
    assert [m["role"] for m in messages] == [m["role"] for m in HISTORY]
    assert messages[2]["tool_calls"][1]["function"]["arguments"] == {"city": "Rome", "unit": "C"}
    assert messages[2]["content"] == ""
    assert messages[3] == HISTORY[3]
    assert json.dumps(HISTORY) == before
    assert prepare_messages(HISTORY[:2], None, WITH_TOOLS) == (HISTORY[:2], None)


def test_for_a_template_without_tool_support_everything_becomes_text() -> None:
    before = json.dumps(HISTORY)
    messages, tools = prepare_messages(HISTORY, [WEATHER, TIME], WITHOUT_TOOLS)
    assert tools is None
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    system, calls, results = messages[0]["content"], messages[2]["content"], messages[3]["content"]
    assert system.endswith("\n\nBe brief.")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [WEATHER, TIME]
    _, parsed = parse_tool_calls(calls)
    assert [json.loads(call.arguments)["city"] for call in parsed] == ["Paris", "Rome"]
    assert "tool_calls" not in messages[2]
    assert results == (
        "<tool_response>\n12 degrees\n</tool_response>\n<tool_response>\n21 degrees\n</tool_response>"
    )
    assert json.dumps(HISTORY) == before


def test_without_tools_earlier_calls_are_still_shown() -> None:
    messages, tools = prepare_messages(HISTORY, None, WITHOUT_TOOLS)
    assert tools is None
    assert messages[0] == HISTORY[0]
    assert "Paris" in messages[2]["content"]
    assert "12 degrees" in messages[3]["content"]


def test_tools_add_a_system_message_if_there_is_none() -> None:
    messages, _ = prepare_messages([{"role": "user", "content": "Hi"}], [TIME], WITHOUT_TOOLS)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert '"now"' in messages[0]["content"]


def test_a_call_with_content_keeps_both_and_invalid_arguments_stay_unchanged() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    message = {"role": "assistant", "content": "I'll look.", "tool_calls": [call]}
    [written], _ = prepare_messages([message], None, WITHOUT_TOOLS)
    assert written["content"].startswith("I'll look.\n<tool_call>")
    assert "{bad" in written["content"]
    [kept], _ = prepare_messages([message], None, WITH_TOOLS)
    assert kept["tool_calls"][0]["function"]["arguments"] == "{bad"
    assert kept["content"] == "I'll look."


@pytest.mark.parametrize(
    ("template", "uses"),
    [
        (WITH_TOOLS, True),
        (WITHOUT_TOOLS, False),
        (None, False),
        ("{% if tools is defined %}x{% endif %}", True),
        ("{# tools #}{{ messages[0].tools }} tools", False),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("{% generation %}{{ messages }}{% endgeneration %}", False),
        ("{% for m in messages %}{% break %}{% endfor %}", False),
        ({"default": WITHOUT_TOOLS, "tool_use": WITH_TOOLS}, True),
        ({"default": WITHOUT_TOOLS}, False),
    ],
)
def test_tool_support_is_detected_from_the_template(template: Any, uses: bool) -> None:
    assert template_uses_tools(template) is uses


def test_the_default_models_template_shows_calls_and_results(default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    assert not template_uses_tools(tokenizer.chat_template)
    messages, tools = prepare_messages(HISTORY, [WEATHER], tokenizer.chat_template)
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    for part in ("Be brief.", "The weather in a city.", '"Rome"', "21 degrees", "Thanks!"):
        assert part in prompt


def test_every_tool_parser_that_can_be_set_is_a_format() -> None:
    [setting] = [one for one in declared(ServerConfig) if one.name == "tool_parser"]
    assert setting.choices == ("auto", *tool_parsers())
    for name in tool_parsers():
        assert tool_format(name).parser([]).push("Hi") == [ContentDelta("Hi")]


# --- forced calls

BYTES = tiny.tokenizer()
COMPILER = GrammarCompiler(BYTES, tiny.VOCAB, {257})


def write(grammar: Grammar, seed: int) -> str:
    """A random text that the grammar accepts; every allowed token is equally likely."""
    matcher, rng, tokens = COMPILER.compile(grammar), random.Random(seed), []
    while True:
        allowed = (
            (~forbidden_tokens([matcher], tiny.VOCAB, torch.device("cpu"))[0]).nonzero().flatten().tolist()
        )
        token = rng.choice(allowed)
        if token == 257:
            return str(BYTES.decode(tokens))
        matcher.consume(token)
        tokens.append(token)


def accepts(matcher: Matcher, text: str) -> bool:
    for token in BYTES.encode(text):
        matcher.consume(token)
    forbidden = forbidden_tokens([matcher], tiny.VOCAB, torch.device("cpu"))
    return matcher.error is None and not bool(forbidden[0, 257])


def compiled(grammar: Grammar | None) -> Matcher:
    assert grammar is not None
    return COMPILER.compile(grammar)


@pytest.mark.parametrize("seed", range(8))
def test_required_forces_one_or_more_calls_that_follow_their_schemas(seed: int) -> None:
    grammar = tool_grammar([WEATHER, TIME], "required")
    assert grammar is not None
    content, calls = parse_tool_calls(write(grammar, seed))
    assert content is None
    assert 1 <= len(calls) <= 16
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "now":
            assert arguments == {}
        else:
            assert call.name == "get_weather"
            assert jsonschema_rs.is_valid(WEATHER["function"]["parameters"], arguments)  # type: ignore[index]


@pytest.mark.parametrize("choice", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_named_function_is_called_exactly_once(choice: Any) -> None:
    grammar = tool_grammar([TIME, WEATHER], choice)
    one = HERMES.call("get_weather", {"city": "Rome", "unit": "F"})
    assert accepts(compiled(grammar), one)
    assert not accepts(compiled(grammar), f"{one}\n{one}")
    assert not accepts(compiled(grammar), HERMES.call("now", {}))
    assert not accepts(compiled(grammar), HERMES.call("get_weather", {"city": "Rome", "unit": "K"}))
    assert not accepts(compiled(grammar), "Hello")


def test_without_parallel_calls_there_is_exactly_one() -> None:
    call = HERMES.call("now", {})
    assert accepts(compiled(tool_grammar([TIME], "required")), f"{call}\n{call}")
    assert not accepts(compiled(tool_grammar([TIME], "required", parallel=False)), f"{call}\n{call}")


def test_auto_and_none_need_no_grammar() -> None:
    assert tool_grammar([TIME], "auto") is None
    assert tool_grammar([TIME], "none") is None


def test_a_strict_tool_is_called_correctly_or_not_at_all() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = tool_grammar([strict, TIME], "auto")
    good = HERMES.call("get_weather", {"city": "Rome", "unit": "F"})
    for text in ("", "Hello.", "a <b> c", good, f"Let me see.\n{good}", f"{good}\n{good}\nThat is it."):
        assert accepts(compiled(grammar), text), text
    bad = HERMES.call("get_weather", {"city": "Rome", "unit": "K"})
    for text in (bad, f"Let me see.\n{bad}", "<tool_call>", "<tool_call>\nhm", f"{good}{bad}"):
        assert not accepts(compiled(grammar), text), text


@pytest.mark.parametrize(
    "name", ['we"ird', "back\\slash", "new\nline", "é漢😀", "</tool_call>", '"""', "a|b #{}"]
)
def test_any_name_is_safe_in_the_grammar(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}, TIME]
    for grammar in (tool_grammar(tools, "required"), tool_grammar(tools, {"function": {"name": name}})):
        call = HERMES.call(name, {})
        assert accepts(compiled(grammar), call)
        _, [found] = parse_tool_calls(call)
        assert found.name == name


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([TIME], "zork", "tool_choice names 'zork', but the tools are now"),
        ([], "required", "tool_choice 'required' needs tools"),
        ([TIME], {"type": "function"}, "function with a name"),
        ([{"type": "function", "function": {}}], "required", "function with a name"),
        (
            [{"function": {"name": "f", "parameters": {"type": "string"}}}],
            "required",
            "the parameters of tool 'f' must be a JSON schema of an object",
        ),
        (
            [{"function": {"name": "f", "parameters": {"$ref": "http://x"}}}],
            "required",
            "'http://x' points outside",
        ),
        (
            [
                {"function": {"name": f"f{i}", "parameters": {"properties": {"a": {"multipleOf": 900}}}}}
                for i in range(20)
            ],
            "required",
            "multipleOf is too large",
        ),
    ],
)
def test_invalid_tools_and_choices_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tool_grammar(tools, choice)


def test_many_tools_can_be_compiled() -> None:
    tools = [
        {"type": "function", "function": {**WEATHER["function"], "name": f"tool_{i}"}}  # type: ignore[dict-item]
        for i in range(128)
    ]
    assert accepts(
        compiled(tool_grammar(tools, "required")), HERMES.call("tool_77", {"city": "", "unit": "C"})
    )


def test_the_default_model_calls_a_required_tool(default_model_dir: Path) -> None:
    with LLM(default_model_dir, progress=False, kv_memory="256M") as llm:
        question = [{"role": "user", "content": "What is the weather in Paris, in Celsius?"}]
        messages, shown = prepare_messages(question, [WEATHER, TIME], llm.tokenizer.chat_template)
        prompt = llm.encode(llm.render_chat(messages, tools=shown), add_special_tokens=False)
        grammar = tool_grammar([WEATHER, TIME], "get_weather")
        params = SamplingParams(temperature=0, max_tokens=100, grammar=grammar)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    content, [call] = parse_tool_calls(output.outputs[0].text)
    assert content is None
    assert call.name == "get_weather"
    assert jsonschema_rs.is_valid(WEATHER["function"]["parameters"], json.loads(call.arguments))  # type: ignore[index]
