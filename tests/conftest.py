"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from skim.config import DEFAULT_MODEL
from skim.models.source import prepare


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The bundled model, ready to load; downloaded once into the user's own cache."""
    return prepare(DEFAULT_MODEL, progress=False)
