"""OpenMP's variables: set before torch loads it, never over a user's choice, and within a quota."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skim import cpu


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_users_way_to_wait_is_left_alone(name: str) -> None:
    variables = {name: "7"}
    assert cpu.set_up(variables, cores=4, allowed=math.inf) == {}
    assert variables == {name: "7"}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_users_number_of_threads_is_left_alone(name: str) -> None:
    variables = {name: "7"}
    assert cpu.set_up(variables, cores=4, allowed=1.5) == cpu.WAITING
    assert variables[name] == "7"


@pytest.mark.parametrize(
    ("cores", "allowed", "threads"),
    [(4, math.inf, None), (4, 4.0, None), (4, 8.0, None), (4, 2.0, "2"), (4, 2.9, "2"), (4, 0.3, "1")],
)
def test_threads_follow_the_quota(cores: int, allowed: float, threads: str | None) -> None:
    """Without one, the runtime itself follows the affinity."""
    assert cpu.set_up({}, cores=cores, allowed=allowed).get("OMP_NUM_THREADS") == threads


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")


def test_the_smallest_quota_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", cpu__max="max 100000")
    assert cpu.quota("0::/a/b", tmp_path) == math.inf
    write(tmp_path / "a", cpu__max="150000 100000")
    assert cpu.quota("0::/a/b", tmp_path) == 1.5
    write(tmp_path / "a" / "b", cpu__max="300000 100000")
    assert cpu.quota("0::/a/b", tmp_path) == 1.5
    assert cpu.quota("0::/elsewhere", tmp_path) == math.inf
    write(tmp_path, cpu__max="50000 100000")  # the root of a container's own hierarchy
    assert cpu.quota("0::/elsewhere", tmp_path) == 0.5


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quotas_of_version_1_count(tmp_path: Path, mount: str) -> None:
    groups = f"5:memory:/x\n3:{mount}:/x\n0::/"
    assert cpu.quota(groups, tmp_path) == math.inf
    write(tmp_path / mount / "x", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu.quota(groups, tmp_path) == math.inf
    write(tmp_path / mount / "x", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    assert cpu.quota(groups, tmp_path) == 2.5


@pytest.mark.parametrize("text", ["", "max", "0 0", "-5 100000", "x y", "1"])
def test_a_file_that_is_no_quota_is_ignored(tmp_path: Path, text: str) -> None:
    write(tmp_path, cpu__max=text)
    assert cpu.quota("0::/", tmp_path) == math.inf


PROGRAM = """
import os, skim
print(os.environ["GOMP_SPINCOUNT"], "GOMP_SPINCOUNT" in skim.cpu.without_ours())
import torch
print(torch.get_num_threads())
"""


def test_importing_skim_sets_the_variables_before_torch_is_there() -> None:
    names = {*cpu.WAITING, "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    variables = {name: value for name, value in os.environ.items() if name not in names}
    one = min(os.sched_getaffinity(0))
    found = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{one}}})\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
    )
    assert found.stdout.split() == [str(cpu.SPINS), "False", "1"]
