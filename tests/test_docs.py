"""What the documents say is true: examples run, tables match the code, paths exist.

`python -m tests.test_docs` writes the settings table in README.md anew.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skim import config
from skim.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

_TABLE = re.compile(r"(<!-- settings: .*? -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)")
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|txt|toml)))`")


def settings_table() -> str:
    """The settings of `skim.config` as a Markdown table: name, default, docstring."""
    lines = ["| Setting | Default | Meaning |", "|---|---|---|"]
    for part in dataclasses.fields(config.EngineConfig):
        kind: Any = part.default_factory
        docs = field_docs(kind)
        for field in dataclasses.fields(kind):
            lines.append(f"| `{field.name}` | `{field.default!r}` | {docs[field.name]} |")
    return "\n".join(lines) + "\n"


def field_docs(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def python_blocks(document: Path) -> list[str]:
    return [code for language, code in _FENCE.findall(document.read_text()) if language == "python"]


def test_the_settings_table_is_what_the_dataclasses_say() -> None:
    found = _TABLE.search(README.read_text())
    assert found, "README.md has lost the marks around its settings table"
    assert found[2] == settings_table(), (
        "the settings table in README.md is out of date: python -m tests.test_docs"
    )


def test_every_sampling_parameter_is_listed() -> None:
    section = README.read_text().split("## Sampling parameters")[1].split("\n## ")[0]
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(re.findall(r"`(\w+)`", section)) - {"SamplingParams"} == names


def test_the_python_examples_in_the_readme_run(
    default_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {}
    try:
        for code in python_blocks(README):
            exec(compile(code, str(README), "exec"), namespace)
    finally:
        if "llm" in namespace:
            namespace["llm"].close()
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "16979" in shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_path_exists(document: Path) -> None:
    prose = _FENCE.sub("", document.read_text())
    missing = [link for link in _LINK.findall(prose) if not (document.parent / link).exists()]
    missing += [
        path
        for path in _PATH.findall(prose)
        if not any((base / path).exists() for base in (ROOT, document.parent, ROOT / "src" / "skim"))
    ]
    assert not missing


def test_the_readme_names_the_two_commands_and_the_makefile_has_them() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(_code(path) for path in DOCUMENTS))
    assert {"demo", "test"} <= set(re.findall(r"make (\w+)", README.read_text()))
    assert set(named) <= set(targets)


def _code(document: Path) -> str:
    """Everything in code style: fenced blocks and backticks."""
    text = document.read_text()
    return "\n".join([code for _, code in _FENCE.findall(text)] + re.findall(r"`([^`\n]+)`", text))


def test_the_demo_answers_its_question(default_model_dir: Path) -> None:
    """What `make demo` runs, from its own line in the Makefile."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "examples/ask.py" in line)
    command = shlex.split(line.replace("$(BIN)", sys.executable))
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "4826" in result.stdout
    assert "prompt tokens, first token after" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt", "Why?"], "cannot read nowhere.txt"),
        ([os.devnull, "Why?"], "is empty"),
        (["examples/lighthouse.txt", "Why?", "--max-tokens", "0"], "max_tokens"),
        (["examples/lighthouse.txt", "Why?", "--model", "no such model"], "unknown model"),
    ],
)
def test_the_example_says_what_is_wrong_in_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "examples/ask.py", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


if __name__ == "__main__":
    README.write_text(_TABLE.sub(lambda m: m[1] + settings_table() + m[3], README.read_text()))
