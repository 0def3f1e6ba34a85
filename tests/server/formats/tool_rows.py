"""Replies as each family writes them, with the content and the calls that they mean. One row a tool format.

A row has the templates that its grammar and calls follow, whole replies, replies that are cut or malformed,
and pieces from which a test makes random replies.
"""

# ruff: noqa: RUF001  (DeepSeek's tokens have wide bars)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, str]]
Case = tuple[str, str, Calls]


@dataclass(frozen=True)
class Row:
    replies: dict[str, Case]
    """Text, content, and the calls with their arguments, exactly as text."""
    pieces: tuple[str, ...]
    templates: tuple[str, ...] = ("",)
    ids: str = "call_[0-9a-f]{24}"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool(
        "edit",
        path={"type": "string"},
        text={"type": "string"},
        lines={"type": "array", "items": {"type": "integer"}},
        options={"type": "object"},
        force={"type": "boolean"},
        ratio={"type": "number"},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
    tool("now"),
]

HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
ZURICH = ("get_weather", '{"city": "Zürich", "days": 3}')
NESTED = '{"options": {"a": [1, {"b": "}]\\"{"}], "漢": "😀"}}'

HERMES = Row(
    {
        "text": ("It is sunny in Zürich. 😀\n", "It is sunny in Zürich. 😀\n", []),
        "call": (HERMES_CALL, "", [ZURICH]),
        "text and call": (f"Let me look.\n\n{HERMES_CALL}", "Let me look.", [ZURICH]),
        "calls": (
            f'{HERMES_CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>\nDone.',
            "Done.",
            [ZURICH, ("now", "{}")],
        ),
        "nested": (
            f'<tool_call>{{"name": "edit", "arguments": {NESTED}}}</tool_call>',
            "",
            [("edit", NESTED)],
        ),
        "cut": ('<tool_call>\n{"name": "edit", "arguments": {"path": "/tm', "", [("edit", '{"path": "/tm')]),
        "cut before the name": ('A <tool_call>\n{"na', 'A <tool_call>\n{"na', []),
        "no JSON": (
            "<tool_call>get_weather(Zürich)</tool_call>",
            "<tool_call>get_weather(Zürich)</tool_call>",
            [],
        ),
    },
    (
        "<tool_call>",
        "</tool_call>",
        '{"name": "now"',
        ', "arguments": ',
        "{}",
        '{"a": "',
        '"}',
        "}",
        "<",
        "\n",
    ),
)

LLAMA3 = Row(
    {
        "text": ("Hello { there }.\n", "Hello { there }.\n", []),
        "call": (
            '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}',
            "",
            [ZURICH],
        ),
        "tag": (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}',
            "",
            [ZURICH],
        ),
        "type first": (
            '\n{"type": "function", "name": "now", "parameters": {}}\n',
            "",
            [("now", "{}")],
        ),
        "arguments, before the name": (
            '{"arguments": {"city": "Rom"}, "name": "get_weather"}',
            "",
            [("get_weather", '{"city": "Rom"}')],
        ),
        "calls": (
            '{"name": "now", "parameters": {}}; {"name": "edit", "parameters": ' + NESTED + "}",
            "",
            [("now", "{}"), ("edit", NESTED)],
        ),
        "text and tag": (
            'I will look.\n<|python_tag|>{"name": "now", "parameters": {}}',
            "I will look.",
            [("now", "{}")],
        ),
        "any name after the tag": ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        "text after a call": ('{"name": "now", "parameters": {}} Done.', "Done.", [("now", "{}")]),
        "an answer in JSON": ('{"answer": {"a": [1, 2]}}', '{"answer": {"a": [1, 2]}}', []),
        "an answer with a name": ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        "an answer named like a tool": ('{"name": "now", "x": 1}\n', '{"name": "now", "x": 1}\n', []),
        "JSON later": (
            'Like this: {"name": "now", "parameters": {}}',
            'Like this: {"name": "now", "parameters": {}}',
            [],
        ),
        "code": ('<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
        "cut": ('{"name": "edit", "parameters": {"path": "/tm', "", [("edit", '{"path": "/tm')]),
        "cut before the name": ('{"type": "func', '{"type": "func', []),
    },
    (
        "<|python_tag|>",
        '{"name": "now"',
        '{"name": "f"',
        ', "parameters": ',
        "{}",
        '{"a": "',
        '"}',
        "}",
        ";",
        " ",
    ),
)

MISTRAL_LIST = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'
MISTRAL = Row(
    {
        "text": ("A list: [1, 2] [TOOL_CALL]\n", "A list: [1, 2] [TOOL_CALL]\n", []),
        "list": (f"{MISTRAL_LIST}]", "", [ZURICH]),
        "list of calls": (
            f'{MISTRAL_LIST}, {{"name": "edit", "arguments": {NESTED}, "id": "abcdefghi"}}]',
            "",
            [ZURICH, ("edit", NESTED)],
        ),
        "text and list": (f"Gern.{MISTRAL_LIST}]", "Gern.", [ZURICH]),
        "object": ('[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        "named": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 3}', "", [ZURICH]),
        "named calls": (
            f"Let me see.[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]edit[ARGS]{NESTED}",
            "Let me see.",
            [("now", "{}"), ("edit", NESTED)],
        ),
        "with an id": ('[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{"a": 1}', "", [("now", '{"a": 1}')]),
        "named without a tag": ("[TOOL_CALLS]now{}\n[TOOL_CALLS]now{}", "", [("now", "{}")] * 2),
        "cut": (f'{MISTRAL_LIST}, {{"name": "ed', ', {"name": "ed', [ZURICH]),
        "cut in arguments": ('[TOOL_CALLS]now[ARGS]{"a": "b', "", [("now", '{"a": "b')]),
        "cut in the tag": ("[TOOL_CALLS]now[AR", "[TOOL_CALLS]now[AR", []),
        "no call": ("[TOOL_CALLS] sorry", "[TOOL_CALLS] sorry", []),
        "no arguments": ("[TOOL_CALLS]now[ARGS]sorry", "[TOOL_CALLS]now[ARGS]sorry", []),
        "not closed": (f"{MISTRAL_LIST} and so on", "and so on", [ZURICH]),
    },
    (
        "[TOOL_CALLS]",
        "[ARGS]",
        "now",
        '{"name": "now"',
        ', "arguments": ',
        "{}",
        '{"a": "',
        '"}',
        "}",
        "[",
        "]",
        ",",
    ),
    ("[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]"),
    "[a-zA-Z0-9]{9}",
)

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3 = f'{ONE}function{SEP}get_weather\n```json\n{{"city": "Zürich", "days": 3}}\n```{ONE_END}'
V31 = f'{ONE}get_weather{SEP}{{"city": "Zürich", "days": 3}}{ONE_END}'
DEEPSEEK = Row(
    {
        "text": ("a <｜tool▁ b\n", "a <｜tool▁ b\n", []),
        "V3": (f"{BEGIN}{V3}{END}", "", [ZURICH]),
        "V3, calls": (
            f"Ich sehe nach.\n{BEGIN}{V3}\n{ONE}function{SEP}edit\n```json\n{NESTED}\n```{ONE_END}{END}",
            "Ich sehe nach.",
            [ZURICH, ("edit", NESTED)],
        ),
        "V3.1": (f"{BEGIN}{V31}{END}", "", [ZURICH]),
        "V3.1, calls": (f"{BEGIN}{V31}{ONE}now{SEP}{{}}{ONE_END}{END}!", "!", [ZURICH, ("now", "{}")]),
        "without the outer tags": (f"{V31}\n", "", [ZURICH]),
        "the end is missing": (f"{BEGIN}{V31}", "", [ZURICH]),
        "cut": (f'{BEGIN}{ONE}edit{SEP}{{"path": "/tm', "", [("edit", '{"path": "/tm')]),
        "cut in the fence": (
            f"{BEGIN}{ONE}function{SEP}now\n```js",
            f"{BEGIN}{ONE}function{SEP}now\n```js",
            [],
        ),
        "no call": (f"{BEGIN}oops{END}", f"{BEGIN}oops{END}", []),
        "no arguments": (f"{BEGIN}{ONE}now{SEP}x{ONE_END}{END}", f"{BEGIN}{ONE}now{SEP}x{ONE_END}{END}", []),
        "text in between": (f"{BEGIN}{V31} and {V31}{END}", "and", [ZURICH, ZURICH]),
    },
    (BEGIN, END, ONE, SEP, ONE_END, "function", "now", "\n```json\n", "\n```", "{}", '{"a": "', '"}', "<｜"),
    ("", "'\n```json\n'"),
)

XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n"
)
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODER = Row(
    {
        "text": ("a < b and <function> or <tool_call\n", "a < b and <function> or <tool_call\n", []),
        "call": (f"{XML}</function>\n</tool_call>", "", [ZURICH]),
        "text and calls": (
            f"I'll look.\n{XML}</function>\n</tool_call>\n{NOW}",
            "I'll look.",
            [ZURICH, ("now", "{}")],
        ),
        "without the outer tag": (f"{XML[12:]}</function>\n</tool_call>", "", [ZURICH]),
        "two functions in one tag": (
            f"{XML}</function>\n<function=now></function>\n</tool_call>",
            "",
            [ZURICH, ("now", "{}")],
        ),
        "types": (
            "<tool_call><function=edit><parameter=text>12</parameter><parameter=lines>\n[1, 2]\n</parameter>"
            '<parameter=options>{"a": {"b": "x"}}</parameter><parameter=force>True</parameter>'
            "<parameter=ratio>0.50</parameter><parameter=note>null</parameter></function></tool_call>",
            "",
            [
                (
                    "edit",
                    '{"text": "12", "lines": [1, 2], "options": {"a": {"b": "x"}}, "force": true, '
                    '"ratio": 0.50, "note": null}',
                )
            ],
        ),
        "wrong types stay text": (
            "<function=edit><parameter=ratio>half</parameter><parameter=note>7</parameter>"
            "<parameter=other>[1]</parameter></function></tool_call>",
            "",
            [("edit", '{"ratio": "half", "note": "7", "other": "[1]"}')],
        ),
        "lines and quotes": (
            "<tool_call>\n<function=edit>\n<parameter=text>\n"
            '\tif a < b:\n\n  "x" \\ 😀</p>\n\n</parameter>\n</function>',
            "",
            [("edit", '{"text": "\\tif a < b:\\n\\n  \\"x\\" \\\\ 😀</p>\\n"}')],
        ),
        "parameters that are not closed": (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n<parameter=days>\n2\n</function>\n</tool_call>",
            "",
            [("get_weather", '{"city": "Rom", "days": 2}')],
        ),
        "JSON": (HERMES_CALL, "", [ZURICH]),
        "cut": (XML[: XML.index("ich")], "", [("get_weather", '{"city": "Zür')]),
        "cut in a number": (
            f"{XML}".removesuffix("\n</parameter>\n"),
            "",
            [("get_weather", '{"city": "Zürich", "days": 3')],
        ),
        "cut in the name": ("<tool_call>\n<function=get_w", "<tool_call>\n<function=get_w", []),
        "text in the call": (
            f"{XML}oops</function></tool_call>",
            "oops</function></tool_call>",
            [("get_weather", '{"city": "Zürich", "days": 3')],
        ),
        "no name": ("<tool_call><function=></function>", "<tool_call><function=></function>", []),
    },
    (
        "<tool_call>",
        "</tool_call>",
        "<function=now>",
        "<function=",
        "</function>",
        "<parameter=a>",
        "<parameter=",
        "</parameter>",
        ">",
        "<",
        "\n",
        '{"name": "now"',
        "}",
    ),
)

HARMONY_CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich", "days": 3}'
)
HARMONY = Row(
    {
        "text": ("to be, or <|not|>\n", "to be, or <|not|>\n", []),
        "call": (HARMONY_CALL, "", [ZURICH]),
        "with its end": (f"{HARMONY_CALL}<|call|>", "", [ZURICH]),
        "the recipient after the role": (
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich", "days": 3}',
            "",
            [ZURICH],
        ),
        "calls": (
            f"{HARMONY_CALL}<|call|><|start|>assistant"
            f"<|channel|>commentary to=functions.edit<|message|>{NESTED}",
            "",
            [ZURICH, ("edit", NESTED)],
        ),
        "calls without an end": (
            f"{HARMONY_CALL}<|start|>assistant to=functions.now<|channel|>commentary<|message|>{{}}<|end|>",
            "",
            [ZURICH, ("now", "{}")],
        ),
        "in the channel of analysis": (
            "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
            "",
            [("now", "{}")],
        ),
        "text and call": (f"I'll look. {HARMONY_CALL}", "I'll look.", [ZURICH]),
        "cut": (HARMONY_CALL[:-9], "", [("get_weather", '{"city": "Zürich", "')]),
        "cut in the header": (HARMONY_CALL[:40], HARMONY_CALL[:40], []),
        "to another": (
            "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
            "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
            [],
        ),
        "an unknown header": (
            "<|channel|>news to=functions.now<|message|>{}",
            "<|channel|>news to=functions.now<|message|>{}",
            [],
        ),
    },
    (
        "<|start|>assistant",
        "<|channel|>",
        "commentary",
        "analysis",
        " to=functions.now",
        "<|constrain|>json",
        "<|message|>",
        "<|call|>",
        "<|end|>",
        "{}",
        "<|",
    ),
)

ROWS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "qwen3_coder": CODER,
    "gpt_oss": HARMONY,
}
