"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before torch is imported: test processes share the cores, and spinning OpenMP threads slow each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from skim import progress
from skim.config import DEFAULT_MODEL
from skim.models.source import prepare
from tests import tiny
from tests.deal import is_for_gpu

# Background jobs ignore SIGINT, and the processes that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # kernel tests also run without hypothesis
    from hypothesis import settings

    settings.register_profile("skim", deadline=None)  # no test depends on speed
    settings.load_profile("skim")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deal", metavar="I/N", help="run shard I (0 to N-1) of N: every Nth test")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only files with that marker: the libraries of the server may be missing."""
    if config.option.markexpr != "gpu":
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return not any(map(is_for_gpu, files)) or None


SLOW_FILES = (
    "test_triton_interpreted.py",
    "test_docs.py",
    "test_recorded.py",
    "test_lifecycle.py",
    "test_scorers.py",
    "test_compiled.py",
    "test_eval.py",
    "test_settings.py",
    "test_openapi.py",
    "test_stateful.py",
)
"""Files of half a minute or so run first, the slowest at once: started last, one would run alone."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if shard := config.getoption("--deal"):
        index, parts = map(int, shard.split("/"))
        if not 0 <= index < parts:
            raise pytest.UsageError(f"--deal must be I/N with I from 0 to N-1, got {shard!r}")
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != index])
        items[:] = items[index::parts]


@pytest.fixture(autouse=True)
def progress_on_stderr() -> Iterator[None]:
    """A server that ran in this process has sent progress to its log."""
    yield
    progress.say_with(None)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain about leftovers at exit


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_scanned() -> None:
    """Exclude imported modules from garbage collection: engines collect at start, which would take 0.3 s."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment must not change what tests see."""
    for name in [name for name in os.environ if name.startswith("SKIM_") and name != "SKIM_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Directory of the default model, downloaded once into the user's cache."""
    return prepare(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def sketch_dir(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model with few random weights: the same tokens, in a hundredth of the time."""
    return tiny.save_sketch(default_model_dir, tmp_path_factory.mktemp("sketch") / DEFAULT_MODEL)
