"""Compile C sources into libraries, once for each machine, and cache them.

As with Triton, a kernel is compiled where it runs, for that processor. Every failure is a `NativeUnavailable`
with its reason; native code is never needed for correctness.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from skim import cache

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
HEADERS = tuple(sorted(SOURCES.glob("*.h")))  # any source may include them
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fPIC", "-shared"),
    # gcc leaves some multiply-adds unfused on AMD processors, others not: the same sum would have other bits
    "--param=avoid-fma-max-bits=0",
)
MAPS = Path("/proc/self/maps")
COMPILE_SECONDS = 60
_DIGEST_BYTES = hashlib.sha256().digest_size
_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class NativeUnavailable(Exception):
    """Native code cannot be used on this machine; the message is the reason."""


def load(source: Path) -> ctypes.CDLL:
    """Return the source's compiled library, from the cache or built now.

    The library is executed, so no other user may have put it there. The cache's directory and the file are
    opened once and checked, and the library is loaded from its descriptor: a file in its place is not.
    """
    command = _compiler()
    name = f"{source.stem}-{_key(command, source)}.so"
    directory = cache.root() / "native"
    with _private(directory) as there:
        found = _open_intact(name, there)
        if found is None:
            _build(command, source, directory / name, there)
            found = _open_intact(name, there)
        if found is None:
            raise NativeUnavailable(f"{directory / name} was changed while it was built")
    file, digest = found
    if digest in _loaded:
        os.close(file)
        return _loaded[digest]
    try:
        # The descriptor stays open: loaders know a library by its name, and another file would get this one.
        by_descriptor = Path(f"/proc/self/fd/{file}")
        library = ctypes.CDLL(str(by_descriptor if by_descriptor.exists() else directory / name))
    except OSError as error:
        os.close(file)
        raise NativeUnavailable(f"{directory / name} cannot be loaded: {error}") from error
    _loaded[digest] = library
    return library


_loaded: dict[bytes, ctypes.CDLL] = {}  # by digest

_Made = TypeVar("_Made")


def available(make: Callable[[], _Made], check: Callable[[_Made], None], without: str) -> _Made | None:
    """Native code that was built and passes its check, which compares it with torch.

    None if it cannot be used: the log then says what happens `without` it, and why.
    """
    try:
        made = make()
        check(made)
    except NativeUnavailable as reason:
        log.info("%s: %s", without, reason)
        return None
    return made


@contextlib.contextmanager
def _private(directory: Path) -> Iterator[int]:
    """A descriptor of the directory, which is made if needed. Only this user or root may write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NativeUnavailable(f"cannot write {directory}: {error.strerror or error}") from error
    try:
        if not _is_ours(os.fstat(there)):
            raise NativeUnavailable(
                f"{directory} may be written by others, so code in it is not loaded; run chmod 700 on it as "
                "its owner, or set SKIM_CACHE to another directory"
            )
        yield there
    finally:
        os.close(there)


def _is_ours(status: os.stat_result) -> bool:
    """True if only this user or root may write."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def team_launcher() -> int:
    """Return the address of `GOMP_parallel` in the OpenMP runtime that torch uses.

    A second runtime would start a second team of threads on the same cores. If no runtime or several are
    loaded, torch's cannot be identified, and this raises `NativeUnavailable`.
    """
    try:
        lines = MAPS.read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"cannot read {MAPS} to find torch's OpenMP runtime") from error
    mapped = sorted({line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)})
    if len(mapped) != 1:
        raise NativeUnavailable(f"expected one loaded OpenMP runtime, found: {', '.join(mapped) or 'none'}")
    try:
        launcher = ctypes.cast(ctypes.CDLL(mapped[0]).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{mapped[0]} has no GOMP_parallel") from error
    assert launcher is not None
    return launcher


def _compiler() -> list[str]:
    """Return the command in `$CC`, or the first of cc, gcc and clang that exists."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for words in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise NativeUnavailable(f"no C compiler found ({chosen[0] if chosen else 'cc, gcc or clang'})")


def _key(command: list[str], source: Path) -> str:
    """Cache key: everything that changes the compiled code (source, flags, compiler, processor)."""
    version = _run([*command, "--version"])
    texts = [file.read_text() for file in (source, *HEADERS)]
    parts = [*texts, *FLAGS, *command, version, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Identify the processor as `-march=native` does: different machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in names}))


def _open_intact(name: str, there: int) -> tuple[int, bytes] | None:
    """A descriptor of a complete file that only this user or root may write, and its digest; None if none.

    A library ends with the digest of its contents (loaders ignore data after an ELF file's sections). Mapping
    a truncated file could kill the process, which no `except` can catch.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=there)
    except OSError:
        return None
    try:
        with open(file, "rb", closefd=False) as library:
            data = library.read()
        digest = hashlib.sha256(data[:-_DIGEST_BYTES]).digest()
        if _is_ours(os.fstat(file)) and digest == data[-_DIGEST_BYTES:]:
            return file, digest
    except OSError:
        pass
    os.close(file)
    return None


def _build(command: list[str], source: Path, target: Path, there: int) -> None:
    """Compile in a temporary directory, then rename into place, so that concurrent builds are safe.

    `there` is a descriptor of the target's directory.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / target.name
        _run([*command, *FLAGS, f"-I{SOURCES}", str(source), "-o", str(made)])
        data = made.read_bytes()
    unfinished = f".building-{secrets.token_hex(8)}"
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=there)
        try:
            with open(file, "wb") as out:
                out.write(data + hashlib.sha256(data).digest())
            os.replace(unfinished, target.name, src_dir_fd=there, dst_dir_fd=there)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=there)
            raise
    except OSError as error:
        raise NativeUnavailable(f"cannot write {target}: {error.strerror or error}") from error
    log.info("compiled %s in %.1f s: %s", source.name, time.perf_counter() - start, target)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot run {command[0]}: {error}") from error
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        first = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0])
        raise NativeUnavailable(f"{command[0]} failed: {first}")
    return result.stdout
