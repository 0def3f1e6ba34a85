"""Grammars as clients write them: closed schemas, regular expressions, choices, GBNF, Lark, alternatives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from skim.errors import RequestError
from skim.sampling import Grammar, GrammarCompiler
from skim.sampling.closed import close_objects
from skim.sampling.dialects import MAX_GBNF_LENGTH, MAX_GBNF_RULES
from tests import tiny

BYTES = tiny.tokenizer()
EOS = 257
COMPILER = GrammarCompiler(BYTES, 258, {EOS})
SECONDS = 10.0  # guards against minutes; the slowest takes about one second


def accepts(grammar: Grammar, text: str) -> bool:
    """True if a reply of exactly this text follows the grammar."""
    matcher = COMPILER.compile(grammar)
    words = torch.zeros(matcher.words, dtype=torch.int32)
    for token in [*BYTES(text, add_special_tokens=False)["input_ids"], EOS]:
        matcher.fill(words)
        if not int(words[token // 32]) >> (token % 32) & 1:
            return False
        matcher.consume(token)
    return matcher.error is None


# -- closed objects

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
CLOSED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "an object": ({"type": "object", **A}, ["{}", '{"a": 1}'], ['{"b": 1}', '{"a": 1, "c": 2}']),
    "no names": ({"type": "object"}, ["{}", '{"b": 1}'], []),
    "no names but none": ({"type": "object", "properties": {}}, ["{}"], ['{"b": 1}']),
    "open by its own word": ({"type": "object", **A, "additionalProperties": True}, ['{"b": 1}'], ["[]"]),
    "typed by its own word": (
        {"type": "object", **A, "additionalProperties": {"type": "boolean"}},
        ['{"a": 1, "b": true}'],
        ['{"a": 1, "b": 2}'],
    ),
    "names by pattern": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
        ['{"x1": 1}'],
        ['{"y": 1}'],
    ),
    "inside": (
        {"type": "array", "items": {"type": "object", **A}},
        ['[{"a": 1}]'],
        ['[{"b": 1}]'],
    ),
    "by reference": (
        {
            "$defs": {"it": {"type": "object", **A}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/it"}},
        },
        ['{"x": {"a": 1}}'],
        ['{"x": {"b": 1}}', '{"a": 1}'],
    ),
    "recursive": (
        {"type": "object", "properties": {"down": {"$ref": "#"}}},
        ['{"down": {"down": {}}}'],
        ['{"down": {"up": {}}}'],
    ),
    "one of several": (
        {"anyOf": [{"type": "object", **A}, {"type": "object", **B}]},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', '{"c": 1}'],
    ),
    "a lone part": ({"allOf": [{"type": "object", **A}]}, ['{"a": 1}'], ['{"b": 1}']),
    "required beside": (
        {"type": "object", **A, "anyOf": [{"required": ["a"]}]},
        ['{"a": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "parts together": (
        {"allOf": [{"type": "object", **A, "required": ["a"]}, {"type": "object", **B, "required": ["b"]}]},
        ['{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}'],
        ['{"a": 1}'],
    ),
    "a part used twice": (
        {
            "$defs": {"base": {"type": "object", **A}},
            "type": "object",
            "properties": {"x": {"allOf": [{"$ref": "#/$defs/base"}, {"type": "object", **B}]}},
        },
        ['{"x": {"a": 1, "b": 2}}'],
        ['{"x": {}, "y": 1}'],
    ),
    "said by a part": (
        {"type": "object", **A, "allOf": [{"additionalProperties": {"type": "integer"}}]},
        ['{"a": 1, "b": 2}'],
        ['{"b": true}'],
    ),
    "a property named properties": (
        {"type": "object", "properties": {"properties": {"type": "object"}}},
        ['{"properties": {"z": 1}}'],
        ['{"z": 1}'],
    ),
    "data that looks like a schema": (
        {"type": "object", "properties": {"a": {"const": {"properties": {"b": 1}}}}},
        ['{"a": {"properties": {"b": 1}}}'],
        ['{"a": {"properties": {"b": 1}, "additionalProperties": false}}'],
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed_unless_the_schema_says_otherwise(name: str) -> None:
    schema, accepted, refused = CLOSED[name]
    before = json.dumps(schema)
    grammar = Grammar.json_schema(schema)
    assert json.dumps(schema) == before, "the caller's schema was changed"
    assert [accepts(grammar, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(grammar, text) for text in refused] == [False] * len(refused)


def test_closing_takes_linear_time_and_ends_on_cycles() -> None:
    loop: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    close_objects(loop)
    many = {"$defs": {"all": {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(3000)]}}}
    many["$defs"] |= {f"d{i}": {"allOf": [{"$ref": "#/$defs/all"}, dict(A)]} for i in range(3000)}
    start = time.perf_counter()
    close_objects(many)
    assert time.perf_counter() - start < SECONDS
    assert not any("additionalProperties" in one for one in many["$defs"].values())


# -- regular expressions, choices, grammars

JSON_GBNF = r"""
root   ::= object
value  ::= object | string | number   # a subset
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt] )* "\"" ws
number ::= "-"? [0-9]{1,15} ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""

TEXTS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "regex": (Grammar.regex(r"\d{4}-\d\d"), ["2024-05"], ["2024-5", "x2024-05", "2024-05 "]),
    "anchored regex": (Grammar.regex("^(yes|no)$"), ["yes", "no"], ["yess", "n"]),
    "regex with slashes and lines": (Grammar.regex("a/b\n[/\\\\]+"), ["a/b\n/\\"], ["a/b"]),
    "choice": (Grammar.choice(["a b", 'q"\\\n', "é漢", ""]), ["a b", 'q"\\\n', "é漢", ""], ["a", "é"]),
    "one choice": (Grammar.choice(["only"]), ["only"], ["onl", ""]),
    "lark": (Grammar.text('start: "a" b\nb: /[0-9]+/'), ["a12"], ["a", "12"]),
    "lark with a header": (Grammar.text('%llguidance {}\nstart: "a"+'), ["aa"], [""]),
    "lark with a schema": (Grammar.text('start: "x" %json {"type": "integer"}'), ["x12"], ["x", 'x"1"']),
    "gbnf": (Grammar.text('root ::= ("yes" | "no") "!"? # a comment'), ["yes", "no!"], ["no?", ""]),
    "gbnf of json": (Grammar.text(JSON_GBNF), ['{"a": {"b\\n": -1.5}}', "{}"], ["[]", '{"a": }']),
    "gbnf with numbered escapes": (
        Grammar.text(r'root ::= "\u00e9\x41\U0001F600\\u" [\u0430-\u044f\u0021]'),
        ["éA😀\\uж", "éA😀\\u!"],
        ["éA😀\\ux"],
    ),
    "gbnf with repetitions": (
        Grammar.text('root ::= item{2,3}\nitem ::= [a-z]+ ","'),
        ["ab,c,", "a,b,c,"],
        ["a,", "a,b,c,d,"],
    ),
    "a rule of gbnf named start": (Grammar.text('root ::= begin\nbegin ::= "s" | begin "t"'), ["stt"], ["t"]),
    "either": (
        Grammar.either(
            Grammar.text('start: "<" body ">"\nbody: /[a-z}]+/'),
            Grammar.json_schema({"type": "object", **A}),
        ),
        ["<a}b>", '{"a": 1}'],
        ['<{"a": 1}>', '{"b": 1}', ""],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_reply_follows_the_grammar_and_no_other_does(name: str) -> None:
    grammar, accepted, refused = TEXTS[name]
    assert [accepts(grammar, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(grammar, text) for text in refused] == [False] * len(refused)


def chain(rules: int, body: str = "") -> str:
    """GBNF rules in the order that takes the converter longest."""
    lines = [f"r{i} ::= {body} r{i + 1}" for i in range(rules - 2)]
    return "\n".join(["root ::= r0", *lines, f'r{rules - 2} ::= "x"'])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.choice([]), "at least one"),
        (lambda: Grammar.regex("("), "regex"),
        (lambda: Grammar.regex("a(?=b)"), "regex"),
        (lambda: Grammar.text(""), "start"),
        (lambda: Grammar.text("start: %json nothing"), "not followed by a JSON schema"),
        (lambda: Grammar.text('start: %json {"type": "string", "minLength": 1000000}'), "minLength"),
        (lambda: Grammar.text("start: %json " + '{"items": ' * 5000 + "1" + "}" * 5000), "JSON schema"),
        (lambda: Grammar.text('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance"),
        (lambda: Grammar.text("root ::= missing"), "missing"),
        (lambda: Grammar.text('foo ::= "a"'), "root"),
        (lambda: Grammar.text('root ::= "a'), "GBNF"),
        (lambda: Grammar.text("root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "too deep"),
        (lambda: Grammar.text(chain(MAX_GBNF_RULES + 1)), f"{MAX_GBNF_RULES + 1} rules"),
        (lambda: Grammar.text('root ::= "' + "a" * MAX_GBNF_LENGTH + '"'), "characters"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_a_reason(make: Any, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message) as caught:
        COMPILER.compile(make())
    assert caught.value.fields == ("grammar",)
    assert len(str(caught.value)) < 600
    assert time.perf_counter() - start < SECONDS


def test_the_largest_gbnf_grammar_is_converted_in_bounded_time() -> None:
    body = ' "a"' * ((MAX_GBNF_LENGTH - 20 * MAX_GBNF_RULES) // MAX_GBNF_RULES // 4)
    start = time.perf_counter()
    Grammar.text(chain(MAX_GBNF_RULES, body))
    assert time.perf_counter() - start < SECONDS


def test_an_error_names_the_field_that_asked_for_the_grammar() -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(Grammar("start: /(/", asked_by="guided_regex"))
    assert caught.value.fields == ("guided_regex",)
    assert Grammar("a", asked_by="x") == Grammar("a", asked_by="y")
