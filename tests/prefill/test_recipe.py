"""A scorer is one file: follows the recipe in docs/architecture.md exactly. Also tests the registry."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skim import registry
from skim.cli.main import main
from skim.config import PrefillConfig
from skim.errors import ConfigError
from skim.prefill import scorers as package
from skim.registry import Declaration, scorers
from tests import paths

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
NAME = "digits"
NUMBERS = " ".join(str(number) for number in range(90_000, 90_150))
QUESTION = "What did he say about the weather?"


def example() -> str:
    """The file in the recipe."""
    [code] = re.findall(r"<!-- recipe: .*? -->\n```python\n(.*?)^```$", ARCHITECTURE.read_text(), re.S | re.M)
    return str(code)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the registry's path."""
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, registry.module_of(NAME), raising=False)
    return tmp_path


@pytest.fixture
def added(directory: Path) -> None:
    (directory / f"{NAME}.py").write_text(example())


@pytest.mark.usefixtures("added", "default_model_dir")
def test_the_recipes_scorer_plans_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = paths.BOOK[:12_000], paths.BOOK[12_000:24_000]
    text = tmp_path / "text.txt"
    text.write_text(f"{before} {NUMBERS} {after}")
    arguments = ["--scorer", NAME, "--keep-tokens", "600", "--rescue-cap", "0", "--json"]
    assert main(["plan", str(text), "-q", QUESTION, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scorer"] == NAME
    scores = found["scores"]
    best = max(range(len(scores)), key=scores.__getitem__)
    assert found["reasons"][best] == "scored"
    chosen = [block for block, reason in enumerate(found["reasons"]) if reason == "scored"]
    others = [block for block, reason in enumerate(found["reasons"]) if reason is None]
    assert min(scores[block] for block in chosen) >= max(scores[block] for block in others)


@pytest.mark.usefixtures("added")
def test_the_recipes_scorer_is_in_the_help_and_among_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert PrefillConfig(scorer=NAME).scorer == NAME
    with pytest.raises(
        ConfigError, match=rf"scorer must be one of blend, .*\b{NAME}\b.*, random, got 'magic'"
    ):
        PrefillConfig(scorer="magic")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert f"`{NAME}` (number of digits)" in " ".join(capsys.readouterr().out.split())


def test_without_the_directory_the_scorer_is_unknown() -> None:
    assert NAME not in scorers()


def test_the_default_comes_first_and_the_control_last() -> None:
    names = list(scorers())
    assert (names[0], names[-1]) == (PrefillConfig().scorer, "random")
    assert len(names) == len(set(names)) >= 7


def test_listing_scorers_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from skim.config import PrefillConfig; PrefillConfig(); "
        "print([name for name in ('torch', 'numpy', 'skim.prefill.scorers.blend') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "it has none"),
        ("scorer = Declaration(help='a')", "it has none"),
        ("SCORER = Declaration(help=HELP)", "malformed"),
        ("SCORER = Declaration(help='a', colour='red')", "colour"),
        ("SCORER = Declaration()", "help"),
        ("SCORER = Declaration(help='')", "one line of text"),
        ("SCORER = Declaration(help='a', model='teacher')", "one of none, target, drafter, got 'teacher'"),
        ("SCORER = (", "never closed"),
    ],
)
def test_a_file_without_a_valid_declaration_is_named(directory: Path, source: str, reason: str) -> None:
    (directory / "broken.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"broken\.py must declare its scorer .*{reason}"):
        scorers()


def test_private_files_are_not_scorers_and_the_first_file_of_a_name_wins(directory: Path) -> None:
    (directory / "_helper.py").write_text("")
    (directory / "random.py").write_text("SCORER = Declaration(help='another')")
    assert "_helper" not in scorers()
    assert isinstance(scorers()["random"], Declaration)
    assert scorers()["random"].help != "another"
