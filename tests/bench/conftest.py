"""Shared by tests of `skim bench`: a tiny shape, and commands that run in this process."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from skim.bench import ceiling
from skim.bench.ceiling import Ceiling
from skim.cli.main import main
from tests import tiny

SCHEMA = json.loads(resources.files("skim").joinpath("data", "report.schema.json").read_text())
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny config with a context window of 1024 tokens."""
    directory = tmp_path_factory.mktemp("shape")
    tiny.CONFIGS["qwen3"]().save_pretrained(directory)
    return str(directory / "config.json")


@pytest.fixture
def run(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; returns its exit code and its report, checked against the schema."""
    monkeypatch.setattr(ceiling, "measure_ceiling", lambda *_: Ceiling(flops=1e11, bandwidth=1e10))
    monkeypatch.setenv("SKIM_KV_MEMORY", "16M")
    for name in ("freeze", "unfreeze"):  # imported modules stay frozen, nothing else is
        monkeypatch.setattr(gc, name, lambda: None)

    def go(
        command: str, *options: str, model: Sequence[str] = ("--shape", shape)
    ) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "report.json"
        code = main(["bench", command, *model, "--json", str(file), *options])
        report = json.loads(file.read_text())
        jsonschema_rs.validate(SCHEMA, report)
        return code, report

    return go
