"""What the documents say is true: examples run, tables match the code, paths exist.

`python -m tests.test_docs` writes the tables of settings, scorers, parsers and clients anew.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skim import config
from skim.cli.main import parse
from skim.config.declare import field_docs
from skim.registry import MODELS, reasoning_parsers, scorers, tool_parsers
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.clients.matrix import matrix
from tests.live import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SERVER = ROOT / "docs" / "server.md"
REFERENCE = ROOT / "docs" / "reference.md"
FOR_USERS = [README, SERVER, REFERENCE]  # their examples and commands run
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

_TABLE = re.compile(
    r"(<!-- (settings|scorers|parsers|clients): [^\n]*? -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:\w+=\S+ )*skim .*$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)[^)]*\)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|txt|toml)))`")


def settings_table() -> str:
    """The settings of `skim.config` as a Markdown table: flag, default, docstring."""
    parts: list[Any] = [part.default_factory for part in dataclasses.fields(config.EngineConfig)]
    lines = ["| Flag | Default | Meaning |", "|---|---|---|"]
    for kind in (*parts, config.ServerConfig):
        docs = field_docs(kind)
        for field in dataclasses.fields(kind):
            flag = "--" + field.name.replace("_", "-")
            default = "" if field.default is None else f"`{field.default}`"
            lines.append(f"| `{flag}` | {default} | {docs[field.name]} |")
    return "\n".join(lines) + "\n"


def scorers_table() -> str:
    """The registered scorers as a Markdown table: name, help line, model."""
    lines = ["| Scorer | Ranks blocks by | Model |", "|---|---|---|"]
    lines += [f"| `{name}` | {one.help} | {MODELS[one.model]} |" for name, one in scorers().items()]
    return "\n".join(lines) + "\n"


def parsers_table() -> str:
    """The registered parsers as a Markdown table: flag, name, format, families."""
    lines = ["| Flag | Parser | Reads | Families |", "|---|---|---|---|"]
    for flag, parsers in (("--tool-parser", tool_parsers()), ("--reasoning-parser", reasoning_parsers())):
        for name, one in parsers.items():
            shown = one.help.replace("|", "\\|")
            lines.append(f"| `{flag}` | `{name}` | {shown} | {one.families} |")
    return "\n".join(lines) + "\n"


TABLES = {"settings": settings_table, "scorers": scorers_table, "parsers": parsers_table, "clients": matrix}


def blocks(language: str) -> list[str]:
    """Fenced blocks of the documents for users, in order."""
    text = "\n".join(path.read_text() for path in FOR_USERS)
    return [code for tongue, code in _FENCE.findall(text) if tongue == language]


def is_client(code: str) -> bool:
    """Whether an example talks to a server that is running."""
    return "127.0.0.1:8000" in code


def test_the_tables_are_what_the_code_says() -> None:
    found = {match[2]: match[3] for path in DOCUMENTS for match in _TABLE.finditer(path.read_text())}
    assert found.keys() == TABLES.keys(), "a document has lost the marks around a table"
    for name, table in TABLES.items():
        assert found[name] == table(), f"the table of {name} is out of date: python -m tests.test_docs"


def test_the_help_of_keep_names_the_default_budget() -> None:
    budget = f"hold {config.AUTO_MASS:.0%} of the total score, at most {config.AUTO_RATIO:.0%} of the prompt"
    assert budget in field_docs(config.PrefillConfig)["keep"]


def test_every_sampling_parameter_is_listed() -> None:
    section = REFERENCE.read_text().split("## Sampling parameters")[1].split("\n## ")[0]
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(re.findall(r"`(\w+)`", section)) - {"SamplingParams"} == names


def test_the_python_examples_run(default_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    try:
        for code in blocks("python"):
            if is_client(code):
                continue
            exec(compile(code, "<example>", "exec"), namespace)
    finally:
        if "llm" in namespace:
            namespace["llm"].close()
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "16979" in shown


def test_the_client_examples_run_against_skim_serve(
    default_model_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    curl = [code for code in blocks("sh") if is_client(code)]
    python = [code for code in blocks("python") if is_client(code)]
    assert curl
    assert python
    assert any("skim unpark" in code for code in curl)
    routes = {route for code in curl for route in re.findall(r":8000/(?:v1/)?(\S+)", code)}
    assert routes >= {"chat/completions", "responses", "messages", "rerank", "skim", "admin/checkpoints"}
    variables = {"SKIM_ADMIN_KEY": "secret", "SKIM_CHECKPOINT_DIR": str(tmp_path)}
    with ServerProcess(name=config.DEFAULT_MODEL, variables=variables) as server:
        server.wait_for("ready")
        for code in (code.replace("http://127.0.0.1:8000", server.url) for code in curl):
            run = re.sub(r"^skim ", f"{shlex.quote(sys.executable)} -m skim ", code, flags=re.MULTILINE)
            result = subprocess.run(["bash", "-ec", run], capture_output=True, text=True, check=True)
            assert answer_of(code) in result.stdout
        for code in (code.replace("http://127.0.0.1:8000", server.url) for code in python):
            exec(compile(code, "<example>", "exec"), {})
            assert "16979" in capsys.readouterr().out
        assert server.stop() == 0


def answer_of(code: str) -> str:
    """A part of what an example for a running server prints."""
    if "admin/checkpoints" in code:
        return '"cached_tokens":'
    return "16979" if "curl" in code else "resident"


Command = tuple[dict[str, str], list[str]]  # variables, and the words after `skim`


def skim_commands(model: Path) -> list[Command]:
    """All `skim` commands for users that need no server, the demo first. Servers use a free port."""
    commands = []
    for line in _COMMAND.findall("\n".join(code for code in blocks("sh") if not is_client(code))):
        words = shlex.split(line.replace("path/to/model", str(model)))
        at = words.index("skim")
        free_port = ["--port", "0"] if words[at + 1] == "serve" else []
        variables = dict(word.split("=", 1) for word in words[:at])
        commands.append((variables, words[at + 1 :] + free_port))
    demo: Command = ({}, demo_command())
    commands.remove(demo)
    return [demo, *commands]


def abridged(commands: list[Command], small: Path) -> list[Command]:
    """Commands that are no part of another. Benchmarks and evaluations use the model `small`."""
    chosen = [one for one in commands if not any(set(one[1]) < set(other) for _, other in commands)]
    measuring = {"SKIM_MODEL": str(small)}
    return [({**v, **measuring} if words[0] in ("bench", "eval") else v, words) for v, words in chosen]


# The machine's limits are measured once, and briefly. A server is stopped as soon as it is ready.
ONE_PROCESS = """
import contextlib, functools, io, json, logging, os, signal, sys
from skim.bench import ceiling
from skim.cli.main import main

class StopWhenReady(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("ready"):
            print(record.getMessage())
            os.kill(os.getpid(), signal.SIGTERM)

ceiling.measure_ceiling = functools.cache(functools.partial(ceiling.measure_ceiling, seconds=0.1))
logging.getLogger("skim.server.run").addHandler(StopWhenReady())
printed = []
for variables, command in json.loads(sys.argv[1]):
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert not main(command), command
    printed.append(out.getvalue())
    for name in variables:
        del os.environ[name]
print(json.dumps(printed))
"""


@pytest.mark.parametrize("complete", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_skim_commands_run(complete: bool, default_model_dir: Path, tmp_path: Path) -> None:
    """In one process: importing torch and transformers would take longer than most commands."""
    every = skim_commands(default_model_dir)
    for _, command in every:
        if command != ["--version"]:
            parse(command)
    commands = every if complete else abridged(every, small_model(tmp_path))
    kinds = {words[0] for _, words in commands}
    assert kinds == {words[0] for _, words in every} >= {"ask", "serve", "bench", "eval", "--version"}
    run = [sys.executable, "-c", ONE_PROCESS, json.dumps(commands)]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    demo, *others = zip(commands, json.loads(result.stdout), strict=True)
    assert demo[0] == ({}, demo_command())
    assert "72 feet" in demo[1]
    # The number depends on the CPU: a faster one scores more of the book.
    assert re.search(r"2\d{5} prompt tokens, \d{3} read .* first token after", result.stderr)
    for (_, command), printed in others:
        assert printed.strip(), command
        assert command[0] != "ask" or "4826" in printed
        assert command[0] != "serve" or printed.startswith("ready")


def small_model(directory: Path) -> Path:
    """A tiny random model with a context window for the contexts of the commands."""
    path = tiny.save("llama", directory / "small")
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4096}))
    return path


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


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    prose = _FENCE.sub("", document.read_text())
    titles = [re.sub(r"[^\w -]", "", title) for title in _HEADING.findall(prose)]
    return {title.strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_anchor_of_a_link_is_a_heading(document: Path) -> None:
    found = _ANCHOR.findall(_FENCE.sub("", document.read_text()))
    targets = [(document.parent / path if path else document, anchor) for path, anchor in found]
    assert [anchor for target, anchor in targets if anchor not in headings(target)] == []


def test_the_readme_links_every_document() -> None:
    linked = {(ROOT / link).resolve() for link in _LINK.findall(README.read_text())}
    assert set(DOCUMENTS) - {README} <= linked


def test_the_readme_names_the_two_commands_and_the_makefile_has_them() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(_code(path) for path in DOCUMENTS))
    assert {"demo", "test"} <= set(re.findall(r"make (\w+)", README.read_text()))
    assert set(named) <= set(targets)


def _code(document: Path) -> str:
    """Everything in code style: fenced blocks and backticks."""
    text = document.read_text()
    return "\n".join([code for _, code in _FENCE.findall(text)] + re.findall(r"`([^`\n]+)`", text))


def demo_command() -> list[str]:
    """What `make demo` runs, from its line in the Makefile: the words after `skim`."""
    makefile = (ROOT / "Makefile").read_text()
    line = next(line for line in makefile.splitlines() if "skim ask" in line)
    question = re.search(r"^QUESTION := (.*)$", makefile, re.MULTILINE)
    assert question
    python, *run, command, file, option, asked = shlex.split(line.replace("$(QUESTION)", question[1]))
    assert [python, *run] == ["$(BIN)", "-m", "skim"]
    return [command, file, option, asked]


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(_TABLE.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], path.read_text()))
