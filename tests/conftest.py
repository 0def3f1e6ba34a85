"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: test processes share the cores and must not wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from skim.config import DEFAULT_MODEL
from skim.models.source import prepare


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The bundled model, ready to load; downloaded once into the user's own cache."""
    return prepare(DEFAULT_MODEL, progress=False)
