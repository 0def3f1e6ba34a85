"""Convert a GGUF file into a transformers directory: config, float32 safetensors, tokenizer, chat template.

Nothing is dropped silently: a tensor that is unknown, missing or of the wrong shape stops the conversion with
an error that names it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skim.errors import ModelError
from skim.models.gguf.config import ARCHITECTURES, Architecture, Settings, build_config, write_json
from skim.models.gguf.file import GGUFFile
from skim.models.gguf.tokenizer import Vocabulary, write_tokenizer
from skim.progress import byte_bar

if TYPE_CHECKING:
    import torch

CONVERSION_VERSION = 1
"""Part of every cache key; raise it when the output of a conversion changes."""

MAX_SHARD_BYTES = 2 * 10**9


def convert(path: Path, directory: Path, *, progress: bool = True) -> None:
    """Write the model in the GGUF file `path` into the existing, empty `directory`."""
    with GGUFFile(path) as file:
        name = str(file.metadata.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise ModelError(
                f"{path} has the architecture {name!r}, which Skim cannot convert; supported: "
                f"{', '.join(ARCHITECTURES)}; use a safetensors directory of this model"
            )
        settings = Settings(file, name)
        config = build_config(file, ARCHITECTURES[name], settings)
        weights = _map_tensors(file, ARCHITECTURES[name], config, _places(file, name, config))
        settings.refuse_unread()
        vocabulary = Vocabulary.of(file)
        write_json(directory / "config.json", config | vocabulary.ids)
        endings = vocabulary.ids | {"eos_token_id": vocabulary.endings()}
        write_json(directory / "generation_config.json", endings)
        write_tokenizer(vocabulary, directory, config["max_position_embeddings"])
        _write_weights(file, weights, directory, progress)


@dataclass(frozen=True)
class _Weight:
    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    """Number of heads whose rotary pairs are reordered for transformers; 0 if the order is right."""
    shift: float = 0.0

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def load(self, file: GGUFFile) -> torch.Tensor:
        value = file.tensor(self.source)
        if self.heads:  # [heads, pairs, 2, ...] -> [heads, 2, pairs, ...]
            value = value.view(self.heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(self.shape)
        return value.add_(self.shift) if self.shift else value.contiguous()


def _places(file: GGUFFile, architecture: str, config: dict[str, Any]) -> dict[str, tuple[str, torch.Size]]:
    """For every tensor the file must have, its transformers name and its shape.

    Names are paired by the gguf package's tables, shapes are those of an empty module with this config.
    """
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config))
    except Exception as error:  # sizes that overflow, or that the config's own checks refuse
        reason = " ".join(str(error).split())[:160]
        raise file.broken(f"its settings make no {config['model_type']} model ({reason})") from error
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])
    places = {}
    for name, value in module.state_dict().items():
        part, _, suffix = name.rpartition(".")
        if part != "lm_head":
            places[f"{names.get_name(part)}.{suffix}"] = name, value.shape
        elif not config["tie_word_embeddings"]:
            places["output.weight"] = name, value.shape
    return places


def _map_tensors(
    file: GGUFFile, arch: Architecture, config: dict[str, Any], places: dict[str, tuple[str, torch.Size]]
) -> list[_Weight]:
    """Map each tensor of the file to one of the model. Refuse unknown, missing and misshapen tensors."""
    missing = [name for name in places if name not in file.tensors]
    unknown = [name for name in file.tensors if name not in places and name != "rope_freqs.weight"]
    for what, names in (("lacks the tensor", missing), ("has the unknown tensor", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{file.path}: this {arch.model_type} model {what} {names[0]!r}{more}; "
                "use another GGUF file or a safetensors directory of this model"
            )
    heads = {}
    if arch.rotary_interleaved:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = []
    for source, (name, shape) in places.items():
        if file.tensors[source].shape != shape:
            raise file.broken(
                f"{source!r} has the shape {list(file.tensors[source].shape)}, not {list(shape)}"
            )
        shift = -1.0 if arch.norm_offset and source.endswith("norm.weight") else 0.0
        weights.append(_Weight(source, name, tuple(shape), heads.get(source.split(".")[-2], 0), shift))
    return weights


def _write_weights(file: GGUFFile, weights: list[_Weight], directory: Path, progress: bool) -> None:
    """Write float32 safetensors, with one tensor in memory at a time."""
    shards: list[list[_Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(w.nbytes for w in shards[-1]) + weight.nbytes > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(weight)
    total = sum(weight.nbytes for weight in weights)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": where},
        )
    with byte_bar(f"converting {file.path.name}", total, progress) as advance, _one_torch_thread():
        for name, shard in zip(names, shards, strict=True):
            _write_shard(file, shard, directory / name, advance)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Decode on one thread: it is memory-bound, and several wait for each other on a busy machine (20x)."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_shard(file: GGUFFile, shard: list[_Weight], path: Path, advance: Callable[[int], object]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in shard:
        end = offset + weight.nbytes
        header[weight.name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for weight in shard:
            out.write(weight.load(file).numpy().data.cast("B"))
            advance(weight.nbytes)
