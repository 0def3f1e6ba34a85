"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

# Before torch is imported: test processes share the cores and must not wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from skim.config import DEFAULT_MODEL
from skim.models.source import prepare

# A job in the background ignores it, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # kernels are also tested where it is not installed
    from hypothesis import settings

    settings.register_profile("skim", deadline=None)  # no test depends on speed
    settings.load_profile("skim")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deal", metavar="I/N", help="run only each Nth test, from the Ith of 0 to N-1 on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if dealt := config.getoption("--deal"):
        mine, parts = map(int, dealt.split("/"))
        if not 0 <= mine < parts:
            raise pytest.UsageError(f"--deal must be I/N with I from 0 to N-1, got {dealt!r}")
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != mine])
        items[:] = items[mine::parts]


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment must not change what tests see."""
    for name in [name for name in os.environ if name.startswith("SKIM_") and name != "SKIM_CACHE"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The bundled model, ready to load; downloaded once into the user's own cache."""
    return prepare(DEFAULT_MODEL, progress=False)
