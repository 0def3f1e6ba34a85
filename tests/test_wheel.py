"""The wheel: what it holds, and that it runs outside the clone with nothing but what it declares."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from skim.version import __version__
from tests.live import ServerProcess
from tests.paths import ROOT, SOURCE

NAME = "skim-engine"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by setuptools from a copy of the sources: building leaves files behind."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [made] = out.glob("*.whl")
    return made


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_every_source_file_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
        entry = archive.read(next(name for name in held if name.endswith("entry_points.txt"))).decode()
        [licence] = [name for name in held if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    package = {name for name in held if ".dist-info/" not in name}
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert package == {path.relative_to(SOURCE.parent).as_posix() for path in files}
    assert {path.suffix for path in files} >= {".c", ".h", ".txt", ".json", ".jsonl", ".jinja", ".typed"}
    assert "skim = skim.cli:start" in entry


def test_the_wheel_has_our_name_and_asks_for_no_package_of_a_similar_one(wheel: Path) -> None:
    found = metadata_of(wheel)
    assert (found["Name"], found["Version"]) == (NAME, __version__)
    assert found["License-Expression"] == "Apache-2.0"
    needed = {Requirement(text).name for text in found.get_all("Requires-Dist", [])}
    assert {name for name in needed if name.startswith("skim")} <= {NAME}


def test_nothing_tells_users_to_install_skim_from_an_index() -> None:
    """The only installs of Skim are from a clone: `pip install .`, with or without extras."""
    texts = [*SOURCE.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile"]
    for path in texts:
        assert not re.search(r"pip install[^`\n]*\bskim\b[\w-]*", path.read_text()), path


def declared(wheel: Path) -> set[str]:
    """The distributions that the wheel requires, and those that they require, as installed here."""
    seen: set[tuple[str, str]] = set()
    queue = [(text, "") for text in metadata_of(wheel).get_all("Requires-Dist", [])]
    while queue:
        text, extra = queue.pop()
        one = Requirement(text)
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *one.extras} - {extra for name, extra in seen if name == one.name}:
            try:
                queue += [(needed, wanted) for needed in metadata.requires(one.name) or []]
            except metadata.PackageNotFoundError:
                continue  # optional there, or for another accelerator
            seen.add((one.name, wanted))
    return {name for name, _ in seen}


def environment(wheel: Path, home: Path) -> Path:
    """A virtual environment with the wheel and links to the distributions it requires, and no other."""
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*command, "--quiet", str(wheel)], check=True)
    [site] = (home / "lib").glob("python*/site-packages")
    for name in declared(wheel):
        here = metadata.distribution(name)
        for top in {file.parts[0] for file in here.files or []} - {"..", "__pycache__"}:
            target = site / top
            if not target.exists():
                target.symlink_to(Path(str(here.locate_file(top))))
    return home / "bin"


@pytest.mark.slow
def test_the_wheel_runs_outside_the_clone(wheel: Path, default_model_dir: Path, tmp_path: Path) -> None:
    binaries = environment(wheel, tmp_path / "venv")
    outside = tmp_path / "work"
    outside.mkdir()
    shutil.copy(ROOT / "examples" / "lighthouse.txt", outside)
    cache = outside / "cache"
    settings = {"PYTHONPATH": "", "SKIM_CACHE": str(cache), "SKIM_MODEL": str(default_model_dir)}
    variables = {**os.environ, **settings}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=outside, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python, skim = str(binaries / "python"), str(binaries / "skim")
    assert run(python, "-c", "import skim; print(skim.__file__)").startswith(str(tmp_path / "venv"))
    assert run(skim, "--version").strip() == f"skim {__version__}"
    assert "4826" in run(skim, "ask", "lighthouse.txt", "-q", "What is the code for the oil store?")
    assert list((cache / "native").glob("*.so")), "the C sources were not compiled"
    with ServerProcess(name="small", skim=[skim], variables=settings, cwd=outside) as server:
        server.wait_for("ready")
        body = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert answer.json()["choices"][0]["message"]["content"], answer.text
        assert server.stop() == 0
