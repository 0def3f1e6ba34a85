"""Formats are chosen by the template, special tokens reach their parsers, and histories fit the template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from skim import registry
from skim.errors import ConfigError
from skim.registry import reasoning_parsers, tool_parsers
from skim.sampling.params import SamplingParams
from skim.sampling.stop import Detokenizer, quick_decode
from skim.server.formats import tools as tools_package
from skim.server.formats.deltas import ContentDelta
from skim.server.formats.dialect import Dialect, reasoning_format, tool_format
from tests import tiny
from tests.server.formats.tool_rows import TOOLS

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)
QWEN = "{{ tools }}" + CALLS.replace("CALL", "<tool_call>{{ c.function.arguments | tojson }}</tool_call>")
WIDE = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
FAMILIES = {
    "plain": (LOOP, "hermes", None),
    "qwen2": (QWEN, "hermes", None),
    "qwen3": (QWEN + "{% if not enable_thinking %}<think>\n\n</think>{% endif %}", "hermes", "think"),
    "coder": (QWEN + "<function=name>\n<parameter=key>", "qwen3_coder", None),
    "llama 3.1": ("{{ tools }}<|python_tag|>", "llama3_json", None),
    "llama 3.2": (
        '{{ tools }}{"name": function name, "parameters": dictionary of argument name and',
        "llama3_json",
        None,
    ),
    "mistral": ("{{ tools }}[TOOL_CALLS]", "mistral", None),
    "magistral": ("{{ tools }}[TOOL_CALLS]x[ARGS] [THINK] <think>", "mistral", "mistral"),
    "deepseek": (f"{{{{ tools }}}}{WIDE}<think>", "deepseek", "think"),
    "gpt-oss": ("<|channel|>analysis<|message|> to=functions.x {{ tools }}", "gpt_oss", "gpt_oss"),
}


def tokenizer(template: Any = LOOP, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    made.chat_template = template
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_are_chosen_by_the_template(family: str) -> None:
    template, calls, thinks = FAMILIES[family]
    found = Dialect.of(tokenizer(template), "auto", "auto")
    assert type(found.tools) is type(tool_format(calls))
    assert type(found.reasoning) is type(reasoning_format(thinks or "none"))
    named = Dialect.of(tokenizer({"default": LOOP, "tool_use": template}), "auto", "auto")
    assert type(named.tools) is type(found.tools)


def test_settings_override_the_template() -> None:
    found = Dialect.of(tokenizer(QWEN + "<think>"), "mistral", "none")
    assert type(found.tools) is type(tool_format("mistral"))
    assert found.reasoning is None
    assert Dialect.of(tokenizer(), "auto", "deepseek_r1").reasoning is not None


# --- special tokens


@pytest.mark.parametrize("name", tool_parsers())
def test_special_tokens_are_shown_only_to_requests_with_tools(name: str) -> None:
    form = tool_format(name)
    used = tokenizer(special=tuple(dict.fromkeys((*form.special, *form.stops, "<|other|>"))))
    dialect = Dialect.of(used, name, "none")
    plain = SamplingParams(stop_token_ids=[7])
    assert dialect.params(plain, calls=False) == plain
    params = dialect.params(plain, calls=True)
    assert used.convert_ids_to_tokens(list(params.shown_special_tokens)) == list(form.special)
    assert params.stop_token_ids == (7, *sorted(used.convert_tokens_to_ids(list(form.stops))))
    assert not Dialect.of(used, name, "none", vocab_size=tiny.VOCAB).stops(calls=True)
    text = f"Hi.<|other|>{form.call('now', {})}</s>"
    ids = used.encode(text, add_special_tokens=False)
    decode = quick_decode(used, True, params.shown_special_tokens)
    detokenizer = Detokenizer(decode, [])
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert shown == f"Hi.{form.call('now', {})}"
    assert decode(ids) == shown


@pytest.mark.parametrize("name", reasoning_parsers())
def test_special_tokens_of_reasoning_are_always_shown(name: str) -> None:
    form = reasoning_format(name)
    assert form is not None
    used = tokenizer(special=tuple(form.special))
    params = Dialect.of(used, "hermes", name).params(SamplingParams(), calls=False)
    assert used.convert_ids_to_tokens(list(params.shown_special_tokens)) == list(form.special)


def test_tokens_that_end_every_reply_are_no_stop_tokens_of_a_request() -> None:
    used = tokenizer(special=tuple(tool_format("gpt_oss").special))
    call, end = used.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    dialect = Dialect.of(used, "gpt_oss", "gpt_oss", ends={end})
    assert dialect.stops(calls=True) == {call}
    assert dialect.params(SamplingParams(), calls=True).stop_token_ids == (call,)


def test_no_shown_tokens_decode_as_before() -> None:
    used = tokenizer(special=("<|a|>", "<|b|>"))
    ids = used.encode("x<|a|>é<|b|>y</s>", add_special_tokens=False)
    assert quick_decode(used, True)(ids) == "xéy"
    assert quick_decode(used, True, [used.convert_tokens_to_ids("<|b|>")])(ids) == "xé<|b|>y"
    assert quick_decode(used, False, [])(ids) == "x<|a|>é<|b|>y</s>"


# --- histories


def asked(*calls: tuple[str, str, str], content: str | None = None, **more: Any) -> dict[str, Any]:
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def result(number: str, content: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": content}


ARGUMENTS = '{"city": "Zürich", "days": 3}'
HISTORY = [{"role": "user", "content": "Hi"}, asked(("call_1", "get_weather", ARGUMENTS)), result("call_1")]


@pytest.mark.parametrize(
    ("written", "as_text"),
    [
        ("{{ c.function.arguments | tojson }}", False),
        (
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
            False,
        ),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", False),
        ("{{ '<' + c.function.arguments + '>' }}", True),
        ("{{ c.function.arguments }}", True),
        ("", False),
    ],
)
def test_arguments_have_the_type_that_the_template_wants(written: str, as_text: bool) -> None:
    template = "{{ tools }}" + CALLS.replace("CALL", written)
    used = tokenizer(template)
    dialect = Dialect.of(used, "auto", "auto")
    assert dialect.arguments_as_text is as_text
    messages, _ = dialect.prepare(HISTORY, TOOLS)
    given = messages[1]["tool_calls"][0]["function"]["arguments"]
    assert given == (ARGUMENTS if as_text else json.loads(ARGUMENTS))
    text = used.apply_chat_template(messages, tokenize=False)
    assert not written or ("Zürich" in text and "'city'" not in text and '\\"city' not in text)


def test_a_template_with_calls_but_without_tools_gets_instructions_and_calls() -> None:
    template = CALLS.replace("CALL", WIDE + "{{ '' + c.function.arguments }}")
    dialect = Dialect.of(tokenizer(template), "auto", "auto")
    messages, shown = dialect.prepare(HISTORY, TOOLS)
    assert shown is None
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool"]
    assert "get_weather" in messages[0]["content"]
    assert WIDE in messages[0]["content"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert dialect.prepare(HISTORY, None)[0][0]["role"] == "user"


@pytest.mark.parametrize("name", ["llama3_json", "gpt_oss"])
def test_several_calls_become_messages_of_one_call_each(name: str) -> None:
    calls = asked(("a", "now", "{}"), ("b", "edit", "{}"), ("c", "now", "{}"), content="Hm.")
    given = [{"role": "user", "content": "Hi"}, calls, result("b", "2"), result("a", "1"), HISTORY[0]]
    found = tool_format(name).history(given)
    order = [one["tool_calls"][0]["id"] if one.get("tool_calls") else one.get("content") for one in found]
    assert order == ["Hi", "a", "b", "2", "1", "c", "Hi"]
    assert found[1]["content"] == "Hm."
    assert tool_format(name).history(HISTORY) == HISTORY
    assert len(calls["tool_calls"]) == 3


def test_mistrals_ids_have_nine_letters_and_results_keep_theirs() -> None:
    form = tool_format("mistral")
    given = [asked(("call_0123456789", "now", "{}"), ("abcdeF123", "now", "{}")), result("call_0123456789")]
    called, answered = form.history(given)
    first, second = (call["id"] for call in called["tool_calls"])
    assert re.fullmatch("[a-zA-Z0-9]{9}", first)
    assert second == "abcdeF123"
    assert answered["tool_call_id"] == first
    assert re.fullmatch("[a-zA-Z0-9]{9}", form.new_id())


def test_reasoning_of_histories_is_named_as_the_template_has_it() -> None:
    said = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
    think, harmony = reasoning_format("think"), reasoning_format("gpt_oss")
    assert think is not None
    assert harmony is not None
    assert think.history(said) == said
    assert harmony.history(said) == {"role": "assistant", "content": "Four.", "thinking": "Hm."}
    called = asked(("a", "now", "{}"), content="I'll look.", reasoning_content="Hm.")
    found = harmony.history(called)
    assert (found["content"], found["thinking"]) == ("", "Hm.\nI'll look.")
    assert "reasoning_content" not in found


# --- a new format


def test_a_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_package, "__path__", [*tools_package.__path__, str(tmp_path)])
    architecture = Path(__file__).parents[3] / "docs" / "architecture.md"
    [code] = re.findall(
        r"<!-- recipe of a parser: .*? -->\n```python\n(.*?)^```$", architecture.read_text(), re.S | re.M
    )
    (tmp_path / "arrows.py").write_text(code)
    assert "arrows" in tool_parsers()
    form = Dialect.of(tokenizer("{{ tools }}=>call"), "auto", "auto").tools
    parser = form.parser()
    [text, begun] = parser.push('Hi. =>now{"a": 1}')[:2]
    assert text == ContentDelta("Hi.")
    assert begun.name == "now"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "it has none"),
        ("PARSER = ParserDeclaration(help='a')", "families"),
        ("PARSER = ParserDeclaration(help='', families='b')", "one line of text"),
        ("PARSER = ParserDeclaration(help='a', families='b', template='(')", "regular expression"),
    ],
)
def test_a_file_without_a_valid_declaration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.setattr(tools_package, "__path__", [*tools_package.__path__, str(tmp_path)])
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"broken\.py must declare its parser .*{reason}"):
        registry.tool_parsers()
