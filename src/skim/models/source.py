"""Turn any model source into a local transformers directory.

A source is a local directory, a GGUF file, the bundled default, or a Hugging Face id, tried in that order.
Weights are read from safetensors and GGUF only: pickle is never opened, and no code from a repository is
fetched or run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from skim import cache
from skim.config import DEFAULT_MODEL
from skim.errors import ModelError, first_line
from skim.models import bundled
from skim.models.gguf.convert import CONVERSION_VERSION, convert
from skim.progress import download_bar

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
_HUB_SKIPPED = ["consolidated*.safetensors", "original/*"]
_PICKLE = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_ACCEPTED = (
    "a local directory with config.json and *.safetensors, a .gguf file, "
    f"a Hugging Face id such as org/name, or the bundled {DEFAULT_MODEL!r}"
)


def prepare(model: str, *, progress: bool = True) -> Path:
    """Return a directory with the model's config.json, safetensors, tokenizer and chat template.

    Downloads and conversions are cached, so a second call returns at once. Progress goes to stderr.
    Every failure is a ModelError and leaves nothing behind in Skim's cache.
    """
    path = Path(os.path.expanduser(model))
    try:
        is_directory, is_file = path.is_dir() and bool(model.strip()), path.is_file()
    except OSError as error:  # the name is too long, or a directory cannot be entered
        raise ModelError(f"unknown model {model[:200]!r}: {error.strerror}; give {_ACCEPTED}") from error
    if is_directory:
        return _checked_directory(path, f"the directory {model}")
    if is_file:
        return _from_gguf(path, progress)
    if model.lower().endswith(".gguf"):
        raise ModelError(f"there is no file {model}; check the path of the .gguf file")
    if model == DEFAULT_MODEL:
        return bundled.prepare(progress=progress)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, progress)
    raise ModelError(f"unknown model {model!r}: there is no such file or directory; give {_ACCEPTED}")


def _from_gguf(path: Path, progress: bool) -> Path:
    """Convert the file, once per path, size and modification time."""
    path = path.resolve()
    if path.suffix.lower() in _PICKLE:
        raise ModelError(f"{path} is a pickle file, which Skim never opens; {_CONVERT}")
    state = path.stat()
    identity = hashlib.sha256(f"{path}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    target = cache.root() / "models" / f"{stem}-{identity}-v{CONVERSION_VERSION}"
    return cache.publish(target, lambda directory: convert(path, directory, progress=progress))


_CONVERT = (
    "Skim reads safetensors only: if you trust the file, load the model once with transformers "
    "and call save_pretrained(directory, safe_serialization=True), then give that directory"
)


def _checked_directory(directory: Path, what: str) -> Path:
    """Return `directory` if a model can be loaded from it, else raise the reason."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{what} has no config.json, so it is not a transformers model; give {_ACCEPTED}")
    if not any(directory.glob("*.safetensors")):
        held = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE)
        found = f"only pickle weights ({held[0]})" if held else "no *.safetensors weights"
        raise ModelError(f"{what} has {found}; {_CONVERT}")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(
                f"{what} has a damaged {index.name}: {error}; download the model again"
            ) from error
        missing = sorted(shard for shard in shards if not (directory / str(shard)).is_file())
        if missing:
            raise ModelError(
                f"{what} lacks {len(missing)} of {len(shards)} weight files, first {missing[0]}; "
                "download them again"
            )
    return directory


def _from_hub(model: str, progress: bool) -> Path:
    """Download `model`, or find it in the hub's own cache. Files with code or pickle are left out."""
    from huggingface_hub import errors, snapshot_download

    bars = download_bar(f"downloading {model}", enabled=progress)
    try:
        directory = snapshot_download(
            model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED, tqdm_class=bars
        )
    except errors.HFValidationError as error:
        raise _hub_error(model, error, "the id is not valid", f"give {_ACCEPTED}") from error
    except errors.GatedRepoError as error:
        remedy = "accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        raise _hub_error(model, error, "access to it is gated", remedy) from error
    except errors.RepositoryNotFoundError as error:
        remedy = "check the spelling; for a private repository log in with `hf auth login` or set HF_TOKEN"
        raise _hub_error(model, error, "there is no such repository, or it is private", remedy) from error
    except errors.LocalEntryNotFoundError as error:
        remedy = f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or use the bundled {DEFAULT_MODEL!r}"
        raise _hub_error(
            model, error, "the hub cannot be reached and it is not in the local cache", remedy
        ) from error
    except Exception as error:  # the hub's client does not wrap transport errors
        raise _hub_error(
            model, error, "the download failed", "check the network and the disk, then try again"
        ) from error
    return _checked_directory(Path(directory), f"the Hugging Face repository {model}")


def _hub_error(model: str, error: Exception, cause: str, remedy: str) -> ModelError:
    root = error.__cause__ or error
    return ModelError(
        f"cannot get {model!r} (no file or directory here) from Hugging Face: {cause} "
        f"({type(root).__name__}: {first_line(root)[:160]}); {remedy}"
    )
