"""The default model, loaded once for the commands that answer with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from skim import LLM
from skim.cli import local
from skim.config import EngineConfig


@pytest.fixture(scope="module")
def llm(default_model_dir: Path) -> Iterator[LLM]:
    with local.opened(EngineConfig.of(model=str(default_model_dir), kv_memory="512M")) as llm:
        yield llm


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Commands find the model loaded; the list has the configs they asked for."""
    asked: list[EngineConfig] = []

    @contextlib.contextmanager
    def opened(config: EngineConfig) -> Iterator[LLM]:
        asked.append(config)
        yield llm

    monkeypatch.setattr(local, "opened", opened)
    monkeypatch.setattr("skim.cli.ask.opened", opened)
    monkeypatch.setattr("skim.cli.plan.opened", opened)
    return asked
