"""The Dockerfile and compose.yaml, without a daemon: `make container-check` executes the steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from skim.config import EngineConfig, ServerConfig
from skim.config.declare import declared, parts
from tests.dockerfile import Instruction, instructions_of, lineage, stages_of
from tests.paths import ROOT

STAGES = stages_of(ROOT / "Dockerfile")
TARGETS = ("cpu", "cuda")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICE_KEYS = {
    *("build", "cap_drop", "deploy", "environment", "ports", "profiles", "read_only", "restart"),
    *("security_opt", "stop_grace_period", "tmpfs", "volumes"),
}


def named(target: str, name: str) -> list[Instruction]:
    return [one for one in instructions_of(STAGES, target) if one.name == name]


def test_images_have_versions_and_no_host() -> None:
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
    assert bases
    for image in bases:
        assert re.fullmatch(r"[a-z0-9]+(/[a-z0-9]+)?:\d[\w.-]*", image), image


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_serves_as_an_ordinary_user_with_a_health_check(target: str) -> None:
    assert STAGES[target].instructions[-1] == Instruction("USER", "skim")
    [command] = named(target, "CMD")
    assert command.words() == ["skim", "serve"]
    [health] = named(target, "HEALTHCHECK")
    options, _, check = health.value.partition("CMD ")
    assert {"--interval", "--timeout", "--start-period"} <= {one.split("=")[0] for one in options.split()}
    assert "127.0.0.1:8000/health" in check
    assert [one.value for one in named(target, "VOLUME")] == ["/cache"]
    assert [one.value for one in named(target, "EXPOSE")] == ["8000"]


@pytest.mark.parametrize("target", TARGETS)
def test_variables_are_settings(target: str) -> None:
    variables = dict(
        pair.split("=", 1) for one in named(target, "ENV") for pair in re.findall(r"\w+=\S+", one.value)
    )
    known = {one.name for kind in (*parts(EngineConfig).values(), ServerConfig) for one in declared(kind)}
    settings = {name for name in variables if name.startswith("SKIM_")} - {"SKIM_CACHE"}
    assert {name.removeprefix("SKIM_").lower() for name in settings} <= known
    assert variables["SKIM_CACHE"] == "/cache"
    if target == "cuda":  # the home directory is read-only under compose.yaml
        assert variables["TRITON_CACHE_DIR"].startswith("/cache/")


def test_copied_stages_exist_and_sources_do_not_reach_the_targets() -> None:
    for name, stage in STAGES.items():
        for one in stage.instructions:
            if one.name == "COPY" and (match := re.match(r"--from=(\S+)", one.value)):
                assert match[1] in STAGES
                assert name in TARGETS
    for target in TARGETS:
        assert "build" not in {stage.name for stage in lineage(STAGES, target)}
        assert all(one.value.startswith("--from=") for one in named(target, "COPY"))


def test_package_lists_are_removed_in_the_layer_that_fetched_them() -> None:
    for stage in STAGES.values():
        for one in stage.instructions:
            if one.name == "RUN" and "apt-get install" in one.value:
                assert "--no-install-recommends" in one.value
                assert one.value.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = {
        word
        for stage in STAGES.values()
        for one in stage.instructions
        if one.name == "COPY" and "--from" not in one.value
        for word in one.value.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_compose_builds_both_targets_with_the_cache_on_a_volume() -> None:
    assert {name for name in COMPOSE if not name.startswith("x-")} == {"services", "volumes"}
    assert COMPOSE["services"].keys() == set(TARGETS)
    for name, service in COMPOSE["services"].items():
        assert service.keys() <= SERVICE_KEYS
        assert service["build"] == {"context": ".", "target": name}
        assert service["volumes"] == ["cache:/cache"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert "SKIM_API_KEY" in service["environment"]
        assert service["read_only"] is True
    [device] = COMPOSE["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert COMPOSE["volumes"].keys() == {"cache"}


@pytest.mark.parametrize(
    "text", ["FROM python:3.12-slim\n", "FROM a:1 AS b\nCOPPY a b\n", "FROM a:1 AS b\nadd a b\n"]
)
def test_a_broken_dockerfile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"stage without a name|unknown instruction"):
        stages_of(path)
