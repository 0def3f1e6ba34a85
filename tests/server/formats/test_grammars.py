"""Forced calls: every format's grammar is read by its parser, with its tags as text and as tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
import torch

from skim.sampling import Grammar, GrammarCompiler
from skim.sampling.grammar import forbidden_tokens
from skim.server.formats.dialect import reasoning_format, tool_format
from skim.server.formats.reply import Parsed, ReplyParser, gathered
from skim.server.formats.tags import TokenTags
from skim.server.tools import tool_grammar
from tests import tiny
from tests.server.formats.reasoning_rows import ROWS as REASONING_ROWS
from tests.server.formats.tool_rows import ROWS, tool

EOS = 257
STRICT = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "place": {"$ref": "#/$defs/Place"},
            },
            "required": ["unit"],
            "additionalProperties": False,
            "$defs": {"Place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        },
    },
}
PATTERN = tool("look", code={"type": "string", "pattern": "^[ab]{2}$"})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [STRICT, PATTERN, NOW]
FORMS = [(name, template) for name, row in ROWS.items() for template in row.templates]


class Writer:
    """Writes random texts that a grammar accepts, with the tags of a format as text or as special tokens."""

    def __init__(self, special: list[str]) -> None:
        self.tokenizer = tiny.tokenizer()
        if special:
            self.tokenizer.add_special_tokens({"additional_special_tokens": special})
        self.vocab = len(self.tokenizer)
        self.tags = TokenTags(self.tokenizer) if special else TokenTags()
        self._compiler = GrammarCompiler(self.tokenizer, self.vocab, {EOS})

    def write(self, grammar: Grammar, seed: int, wanted: str = "", most: int = 3000) -> str:
        """A random text. It follows `wanted` while the grammar allows it, and ends as soon as it may."""
        matcher, rng = self._compiler.compile(grammar), random.Random(seed)
        tokens: list[int] = []
        left = self.tokenizer.encode(wanted, add_special_tokens=False)
        for _ in range(most):
            forbidden = forbidden_tokens([matcher], self.vocab, torch.device("cpu"))[0]
            allowed = (~forbidden).nonzero().flatten().tolist()
            if left and left[0] in allowed:
                token = left.pop(0)
            elif EOS in allowed:
                return str(self.tokenizer.decode(tokens))
            else:
                token = rng.choice(allowed)
            matcher.consume(token)
            tokens.append(token)
        raise AssertionError(f"the grammar did not end: {self.tokenizer.decode(tokens)[-200:]}")

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = self._compiler.compile(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            matcher.consume(token)
        forbidden = forbidden_tokens([matcher], self.vocab, torch.device("cpu"))
        return matcher.error is None and not bool(forbidden[0, EOS])


WRITERS: dict[tuple[str, bool], Writer] = {}


def writer(name: str, as_tokens: bool) -> Writer:
    key = (name, as_tokens)
    if key not in WRITERS:
        thought = reasoning_format(name) if name in REASONING_ROWS else None
        special = [*tool_format(name).special] if name in ROWS else []
        WRITERS[key] = Writer([*special, *(thought.special if thought else ())] if as_tokens else [])
    return WRITERS[key]


def parse(name: str, template: str, text: str) -> Parsed:
    parser = ReplyParser(None, tool_format(name, template).parser(TOOLS))
    return gathered([*parser.push(text), *parser.finish()])


def valid(found: Parsed) -> None:
    for call in found.calls:
        [schema] = [
            one["function"].get("parameters") for one in TOOLS if one["function"]["name"] == call.name
        ]
        arguments = json.loads(call.arguments)
        assert jsonschema_rs.is_valid(schema, arguments) if schema is not None else arguments == {}, call


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(("name", "template"), FORMS)
def test_forced_calls_follow_their_schemas(name: str, template: str, as_tokens: bool) -> None:
    used, form = writer(name, as_tokens), tool_format(name, template)
    for parallel in (True, False):
        grammar = tool_grammar(TOOLS, "required", parallel=parallel, form=form, tags=used.tags)
        assert grammar is not None
        seen = set()
        for seed in range(6):
            found = parse(name, template, used.write(grammar, seed))
            assert found.content == ""
            assert 1 <= len(found.calls) <= (16 if parallel else 1)
            seen.update(call.name for call in found.calls)
            valid(found)
        assert len(seen) > 1
    two = form.calls([("now", {}), ("get_weather", {"unit": "C", "days": 3})]).removesuffix("<|call|>")
    both = tool_grammar(TOOLS, "required", form=form, tags=used.tags)
    single = tool_grammar(TOOLS, "required", parallel=False, form=form, tags=used.tags)
    assert both is not None
    assert single is not None
    assert used.accepts(both, two) is (name != "gpt_oss")  # its calls end the reply
    assert not used.accepts(single, two)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(("name", "template"), FORMS)
def test_a_named_call_is_the_familys_own(name: str, template: str, as_tokens: bool) -> None:
    used, form = writer(name, as_tokens), tool_format(name, template)
    grammar = tool_grammar(TOOLS, "get_weather", form=form, tags=used.tags)
    assert grammar is not None
    good = form.call("get_weather", {"unit": "F", "days": 2, "place": [True]}).removesuffix("<|call|>")
    assert used.accepts(grammar, good)
    for bad in (
        form.call("get_weather", {"unit": "K"}),
        form.call("get_weather", {"unit": "F", "days": 9}),
        form.call("now", {}),
        "Hello",
    ):
        assert not used.accepts(grammar, bad.removesuffix("<|call|>")), bad


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(("name", "template"), FORMS)
def test_a_strict_tool_is_called_correctly_or_not_at_all(name: str, template: str, as_tokens: bool) -> None:
    used, form = writer(name, as_tokens), tool_format(name, template)
    grammar = tool_grammar(TOOLS, "auto", form=form, tags=used.tags)
    assert grammar is not None
    good = form.call("get_weather", {"unit": "F"}).removesuffix("<|call|>")
    bad = form.call("get_weather", {"unit": "K"}).removesuffix("<|call|>")
    answer = "Hello, a <b> [c].\n"
    if name == "gpt_oss":
        answer = f"<|channel|>final<|message|>{answer}"
    assert used.accepts(grammar, answer)
    assert used.accepts(grammar, good)
    assert not used.accepts(grammar, bad)
    if name not in ("gpt_oss", "llama3_json"):  # there a call is the whole reply
        assert used.accepts(grammar, f"Let me see.\n{good}")
        assert not used.accepts(grammar, f"Let me see.\n{bad}")
    assert parse(name, template, good).calls


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", REASONING_ROWS)
def test_a_constrained_reply_may_think_first(name: str, as_tokens: bool) -> None:
    used, form = writer(name, as_tokens), reasoning_format(name)
    assert form is not None
    answer = Grammar.lark("start: answer", {"answer": {"const": {"a": 1}}})
    prompt = f"A: {form.special[0]}\n"
    grammar = form.constrained(None, answer, prompt, used.tags)
    thought = 'Hm, {"b": 2}?'
    wanted = f"{thought}{form.special[1]}"
    if name == "gpt_oss":
        wanted = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    text = used.write(grammar, 0, wanted)
    parser = ReplyParser(form.parser(prompt), None)
    found = gathered([*parser.push(text), *parser.finish()])
    assert found.reasoning == thought
    assert json.loads(found.content) == {"a": 1}
    if name not in ("deepseek_r1", "gpt_oss"):  # nothing was opened: the reply is the answer
        assert form.constrained(None, answer, "A:", used.tags) == answer


def test_harmony_calls_may_think_first() -> None:
    used, thought, form = writer("gpt_oss", True), reasoning_format("gpt_oss"), tool_format("gpt_oss")
    assert thought is not None
    grammar: Any = tool_grammar(TOOLS, "now", form=form, tags=used.tags)
    wrapped = thought.constrained(grammar, None, "", used.tags)
    call = form.call("now", {}).removesuffix("<|call|>")
    assert used.accepts(wrapped, call)
    assert used.accepts(wrapped, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}")
    assert not used.accepts(wrapped, "<|channel|>final<|message|>Hi")


def test_harmony_replies_may_be_calls_or_an_answer() -> None:
    used, thought, form = writer("gpt_oss", True), reasoning_format("gpt_oss"), tool_format("gpt_oss")
    assert thought is not None
    calls = tool_grammar(TOOLS, "now", form=form, tags=used.tags)
    both = thought.constrained(calls, Grammar.choice(["yes", "no"]), "", used.tags)
    for before in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        assert used.accepts(both, before + form.call("now", {}).removesuffix("<|call|>"))
        assert used.accepts(both, f"{before}<|channel|>final<|message|>yes")
        assert not used.accepts(both, f"{before}<|channel|>final<|message|>maybe")
