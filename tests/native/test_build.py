"""The builder of C sources: a library that is built once, or `NativeUnavailable` with the reason."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skim.attention.cpu import native_kernel
from skim.models.forwards import few_tokens
from skim.native import build
from skim.native.build import NativeUnavailable
from tests import paths

SOURCE = native_kernel.SOURCE


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache for this test only, on a machine where C sources can be built."""
    try:
        build.load(SOURCE)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("SKIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A source that compiles at once: the builder treats all sources alike."""
    source = tmp_path / "small.c"
    source.write_text("int skim_answer(void) { return 42; }\n")
    return source


def assert_refused(reason: str, source: Path = SOURCE) -> None:
    with pytest.raises(NativeUnavailable, match=re.escape(reason)):
        build.load(source)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert_refused("no C compiler found (cc, gcc or clang)")


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert_refused("no C compiler found (no-such-compiler)")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert_refused("false failed: exit status 1")


def test_a_source_that_does_not_compile(empty_cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int skim_decode(void) { return missing; }\n")
    assert_refused("missing", broken)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("mapped", "reason"),
    [
        ([], "found: none"),
        (["/a/libgomp-24e2ab19.so.1.0.0", "/b/libiomp5.so"], "/a/libgomp-24e2ab19.so.1.0.0, /b/libiomp5.so"),
        (["/a/libgomp.so.1"], "/a/libgomp.so.1 has no GOMP_parallel"),
    ],
)
def test_torchs_openmp_runtime_must_be_the_only_one(
    mapped: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        f"7f00-7f01 r-xp 00000000 08:01 42    {path}\n" for path in [*mapped, *mapped, "/c/libomptarget.so"]
    ]
    maps = tmp_path / "maps"
    maps.write_text("".join(lines))
    monkeypatch.setattr(build, "MAPS", maps)
    with pytest.raises(NativeUnavailable, match=re.escape(reason)):
        build.team_launcher()


def test_it_is_built_once(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="skim"):
        build.load(SOURCE)
        build.load(SOURCE)
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "compiled decode_attention.c"
    ]
    [library] = empty_cache.iterdir()
    assert library.stat().st_mode & 0o022 == 0


def truncate(library: Path) -> None:
    data = library.read_bytes()
    library.write_bytes(data[: len(data) // 2])


def flip(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    library.write_bytes(data)


def open_to_all(library: Path) -> None:
    library.chmod(0o666)


@pytest.mark.parametrize("damage", [truncate, flip, open_to_all])
def test_a_damaged_library_is_built_anew(damage: Any, empty_cache: Path, small: Path) -> None:
    """In a process of its own: a library that is mapped already must not be written to."""
    finish(start_build(small))
    [library] = empty_cache.iterdir()
    good = library.read_bytes()
    damage(library)
    assert "compiled" in finish(start_build(small))
    assert library.read_bytes()[-32:] == hashlib.sha256(library.read_bytes()[:-32]).digest()
    assert len(library.read_bytes()) == len(good)
    assert "compiled" not in finish(start_build(small))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o770, 0o702])
def test_a_directory_that_others_may_write_is_refused(mode: int, empty_cache: Path, small: Path) -> None:
    finish(start_build(small))
    empty_cache.chmod(mode)
    assert_refused(f"{empty_cache} may be written by others", small)
    empty_cache.chmod(0o700)
    build.load(small)


def test_a_link_in_place_of_the_directory_or_the_library_is_not_followed(
    empty_cache: Path, small: Path, tmp_path: Path
) -> None:
    finish(start_build(small))
    [library] = empty_cache.iterdir()
    elsewhere = tmp_path / "elsewhere"
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    assert "compiled" in finish(start_build(small))
    assert not library.is_symlink()
    empty_cache.rename(tmp_path / "moved")
    empty_cache.symlink_to(tmp_path / "moved")
    assert_refused(f"cannot write {empty_cache}", small)


def test_a_library_planted_after_the_check_is_not_loaded(
    empty_cache: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: everything under the cache is replaced between the check and the loading."""
    small.write_text("int skim_answer(void) { return 4242; }\n")
    planted = tmp_path / "planted.c"
    planted.write_text("int skim_answer(void) { return 13; }\n")
    made = tmp_path / "planted.so"
    subprocess.run([*build._compiler(), "-shared", "-fPIC", str(planted), "-o", str(made)], check=True)
    data = made.read_bytes()
    check = build._open_intact

    def check_then_plant(name: str, there: int) -> Any:
        found = check(name, there)
        if found is not None:
            empty_cache.rename(tmp_path / "moved")
            empty_cache.mkdir()
            (empty_cache / name).write_bytes(data + hashlib.sha256(data).digest())
        return found

    monkeypatch.setattr(build, "_open_intact", check_then_plant)
    assert build.load(small).skim_answer() == 4242


def test_libraries_loaded_in_turn_are_their_own(empty_cache: Path, tmp_path: Path) -> None:
    """A loader that knows libraries by name must not take one for another."""
    answers = []
    for answer in (101, 102, 103, 101):
        source = tmp_path / "same.c"
        source.write_text(f"int skim_answer(void) {{ return {answer}; }}\n")
        answers.append(build.load(source).skim_answer())
    assert answers == [101, 102, 103, 101]


def test_a_cache_that_cannot_be_written(
    empty_cache: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIM_CACHE", os.devnull)
    assert_refused("cannot write /dev/null/native", small)


def test_a_library_that_cannot_be_loaded(empty_cache: Path, small: Path) -> None:
    finish(start_build(small))
    [library] = empty_cache.iterdir()
    text = b"no library"
    library.write_bytes(text + hashlib.sha256(text).digest())
    assert_refused("cannot be loaded", small)


PROGRAM = """
import logging, pathlib, sys
from skim.native import build
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
print(build.load(pathlib.Path(sys.argv[1])).skim_answer())
"""


def start_build(source: Path) -> subprocess.Popen[str]:
    """Load the source's library in a new process."""
    command = [sys.executable, "-c", PROGRAM, str(source)]
    return subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process of `start_build`, which must succeed; the output has its log."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "42"
    return out


def test_processes_that_build_at_once_do_no_harm(
    empty_cache: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler waits, so that all processes find the cache empty."""
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(f'#!/bin/sh\nsleep 0.5\nexec {shlex.join(build._compiler())} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    for process in [start_build(small) for _ in range(3)]:
        finish(process)
    assert len(list(empty_cache.iterdir())) == 1


def test_the_sources_are_in_the_package() -> None:
    assert SOURCE.is_file()
    assert few_tokens.SOURCE.is_file()
    assert {"codes.h", "decode.h", "exp.h"} <= {header.name for header in build.HEADERS}
    assert '"native/*.c", "native/*.h"' in (paths.ROOT / "pyproject.toml").read_text()
