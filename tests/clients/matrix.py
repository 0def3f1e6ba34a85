"""The matrix of clients and features, read from the tests: `docs/clients.md` shows it.

A test file begins with the client's name in backticks. A test's docstring has the feature, a colon, and what
the test shows. The files are parsed, not imported, so no client is needed.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def matrix() -> str:
    """A Markdown table: client, feature, what the tests show."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(HERE.glob("test_*.py")):
        client, shown = read(path)
        for feature, sentence in shown:
            rows[client, feature].append(sentence)
    lines = ["| Client | Feature | The tests show |", "|---|---|---|"]
    for (client, feature), sentences in sorted(rows.items(), key=lambda row: row[0][0]):
        lines.append(f"| {client} | {feature} | {' '.join(sentences)} |")
    return "\n".join(lines) + "\n"


def read(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """The client of a test file, and for each test the feature and what the test shows."""
    module = ast.parse(path.read_text())
    client = re.match(r"(`[\w-]+`): ", ast.get_docstring(module) or "")
    assert client, f"the docstring of {path.name} must begin with the client's name, as in '`openai`: ...'"
    found = []
    for test in module.body:
        if not (isinstance(test, ast.FunctionDef) and test.name.startswith("test_")):
            continue
        said = re.fullmatch(r"([^:]+): (.+\.)", " ".join((ast.get_docstring(test) or "").split()))
        assert said, f"{path.name}: the docstring of {test.name} must be 'Feature: what the test shows.'"
        found.append((said[1], said[2][0].upper() + said[2][1:]))
    return client[1], found
