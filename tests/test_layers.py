"""The rooms and who may import whom; what the core needs to be imported."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deal import is_for_gpu
from tests.paths import ROOT, SOURCE

LAYERS = [  # a module imports from its own room and from those below
    {"__main__"},
    {"cli"},
    {"server"},
    {"calibrate"},
    {"bench", "evals"},
    {"measure"},
    {"checkpoints"},
    {"llm"},
    {"outputs"},
    {"engine"},
    {"decode", "models", "prefill"},
    {"attention"},
    {"native"},
    {"memory", "sampling"},
    {"rendering"},
    {"cache", "config", "control_tokens", "device", "progress", "tokenization"},
    {"registry"},
    {"cpu", "errors", "version"},
]
RANK = {room: len(LAYERS) - i for i, layer in enumerate(LAYERS) for room in layer}
CORE_NEEDS = {"torch", "transformers", "numpy", "safetensors", "tokenizers"}
MODULES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


CORE = [path for path in MODULES if room(path) not in {"__main__", "cli", "server"}]


TABLES = {"__init__.py", "metadata.py", "layout.py", "glance_tables.py", "captured.py"}


def is_kernel(path: Path) -> bool:
    """Whether a module may import Triton: `triton_*.py`, or `attention/cuda` without its tables."""
    in_cuda = path.parent.name == "cuda" and path.name not in TABLES
    return in_cuda or path.name.startswith("triton_")


KERNELS = [path for path in MODULES if is_kernel(path)]


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "skim" and len(parts) > 1 and parts[1] in RANK:
            assert parts[1] == own or RANK[parts[1]] < RANK[own], f"{own} imports {name}"


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in MODULES} - {"__init__"} == set(RANK)


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_imports_at_the_top_only_what_it_may(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    allowed = CORE_NEEDS | ({"triton"} if is_kernel(path) else set())
    assert outside - set(sys.stdlib_module_names) - {"skim"} <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_kernels_are_imported_where_they_are_used(path: Path) -> None:
    if not is_kernel(path):
        modules = {
            ".".join(("skim", *kernel.relative_to(SOURCE).with_suffix("").parts)) for kernel in KERNELS
        }
        kernels = imports(path, top_level_only=True) & modules
        assert kernels == set(), "a machine without Triton could not import this"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_memory_and_attention_touch_slabs(path: Path) -> None:
    if room(path) not in {"memory", "attention"}:
        assert ".slabs" not in path.read_text()


def test_the_first_diagram_of_the_architecture_names_the_rooms() -> None:
    diagram = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    marked = set(re.findall(r"(\w+)(?:/|\.py)", diagram))
    inner = {path.name for path in SOURCE.glob("*/*/")}
    packages = {name for name in RANK if (SOURCE / name).is_dir()}
    assert packages <= marked <= set(RANK) | inner
    assert set(RANK) - set(re.findall(r"\w+", diagram)) == {"__main__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_attention_knows_particular_backends(path: Path) -> None:
    if room(path) != "attention":
        concrete = ("skim.attention.cpu", "skim.attention.cuda")
        assert [name for name in imports(path) if name.startswith(concrete)] == []


GPU_TESTS = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if is_for_gpu(path))
GPU_TESTS_NEED = CORE_NEEDS | {"hypothesis", "pytest", "triton"}


@pytest.mark.parametrize("path", GPU_TESTS, ids=lambda p: p.name)
def test_tests_for_a_gpu_import_little(path: Path) -> None:
    """They run where the libraries of the server are missing."""
    seen, left = {ROOT / "tests" / "conftest.py"}, {path, ROOT / "tests" / "conftest.py"}
    while left:
        seen |= left
        names = {name for one in left for name in imports(one)}
        outside = {name.split(".")[0] for name in names} - {"__future__", "skim", "tests"}
        assert outside - set(sys.stdlib_module_names) <= GPU_TESTS_NEED
        assert not {name for name in names if name.startswith(("skim.cli", "skim.server"))}
        left = {file for name in names if (file := ROOT / f"{name.replace('.', '/')}.py").exists()} - seen


def test_importing_skim_is_cheap() -> None:
    program = (
        "import sys, skim; print(sorted(m for m in ('torch', 'transformers', 'gguf') if m in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
