"""From C source to a loaded library: compiled once for this machine, kept in the cache.

The bargain is Triton's: a kernel is compiled where it runs, for the processor it runs on. Whatever is missing
or goes wrong on the way is a `NativeUnavailable` that says why; nothing in here is needed for correctness.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from skim import cache

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
HEADER = SOURCES / "exp.h"  # that all sources may include
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fPIC", "-shared")
MAPS = Path("/proc/self/maps")
COMPILE_SECONDS = 60
_DIGEST_BYTES = hashlib.sha256().digest_size
_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class NativeUnavailable(Exception):
    """What is native cannot be used here; the message is the reason."""


def load(source: Path) -> ctypes.CDLL:
    """The source's compiled library: from the cache, or built now."""
    command = _compiler()
    target = cache.root() / "native" / f"{source.stem}-{_key(command, source)}.so"
    if not _whole(target):
        _build(command, source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"{target} cannot be loaded: {error}") from error


def team_launcher() -> int:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch computes with.

    A kernel that brought a runtime of its own would bring a second team of threads for the same cores. Where
    it is not certain which runtime is torch's (none, or several, are loaded), there is no launcher.
    """
    try:
        lines = MAPS.read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"no {MAPS} to find torch's OpenMP runtime in") from error
    mapped = sorted({line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)})
    if len(mapped) != 1:
        raise NativeUnavailable(f"one OpenMP runtime is wanted, loaded are: {', '.join(mapped) or 'none'}")
    try:
        launcher = ctypes.cast(ctypes.CDLL(mapped[0]).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{mapped[0]} has no GOMP_parallel") from error
    assert launcher is not None
    return launcher


def _compiler() -> list[str]:
    """`$CC`, or the first of the usual names that exists."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for words in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise NativeUnavailable(f"no C compiler found ({chosen[0] if chosen else 'cc, gcc or clang'})")


def _key(command: list[str], source: Path) -> str:
    """Whatever changes the compiled code: source, flags, compiler and processor."""
    version = _run([*command, "--version"])
    texts = [source.read_text(), HEADER.read_text()]
    parts = [*texts, *FLAGS, *command, version, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What `-march=native` looks at; a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in told}))


def _whole(library: Path) -> bool:
    """Whether the file is complete and nobody else's: it is about to be run.

    A library ends with the digest of what comes before (loaders ignore what follows an ELF file's sections).
    Mapping a truncated one could end the process, which no `except` would notice.
    """
    try:
        status = library.stat()
        data = library.read_bytes()
    except OSError:
        return False
    own = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
    return own and hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _build(command: list[str], source: Path, target: Path) -> None:
    """Compile elsewhere, then rename into place: processes that do this at once do no harm."""
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary) / target.name
            _run([*command, *FLAGS, f"-I{HEADER.parent}", str(source), "-o", str(made)])
            data = made.read_bytes()
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".building-", delete=False) as file:
            try:
                file.write(data + hashlib.sha256(data).digest())
                file.flush()
                os.replace(file.name, target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise NativeUnavailable(f"cannot write {target}: {error.strerror or error}") from error
    log.info("compiled %s in %.1f s: %s", source.name, time.perf_counter() - start, target)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} does not run: {error}") from error
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        first = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0])
        raise NativeUnavailable(f"{command[0]} failed: {first}")
    return result.stdout
