"""Convert a GGUF file into a transformers directory: config, safetensors, tokenizer, chat template.

Matrices of the common quantized types keep their codes. Other tensors become float32. Nothing is dropped
silently: a tensor that is unknown, missing or of the wrong shape stops the conversion with an error that
names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skim.errors import ModelError
from skim.models.gguf.config import ARCHITECTURES, Architecture, Settings, build_config, write_json
from skim.models.gguf.file import GGUFFile
from skim.models.gguf.tokenizer import Vocabulary, write_tokenizer
from skim.progress import byte_bar, say

if TYPE_CHECKING:
    import torch

    from skim.models.quantized.format import CodedWeight
    from skim.models.quantized.stream import Piece

CONVERSION_VERSION = 2
"""Part of every cache key; raise it when the output of a conversion changes."""


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
        quantization = _quantization(file, weights)
        write_json(directory / "config.json", config | vocabulary.ids | quantization)
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

    def piece(self, file: GGUFFile) -> Piece:
        """The weight's tensors in a safetensors file."""
        import torch

        from skim.models.quantized.stream import Piece, Promise

        module = self.name.removesuffix(".weight")
        if (sample := self.sample(file)) is None:
            promised = {self.name: Promise(torch.float32, self.shape)}
            return Piece(promised, lambda: {self.name: self._plain(file)})
        rows = self.shape[0]
        promised = {
            f"{module}.{name}": Promise(plane.dtype, (rows, *plane.shape[1:]))
            for name, plane in sample.planes.items()
        }
        return Piece(
            promised, lambda: {f"{module}.{name}": plane for name, plane in self._coded(file).planes.items()}
        )

    def sample(self, file: GGUFFile) -> CodedWeight | None:
        """One row of zeros in the weight's format; None if the weight is not coded."""
        import torch

        from skim.models.gguf.coded import coded, covers

        entry = file.tensors[self.source]
        if len(self.shape) != 2 or not self.name.endswith(".weight") or not covers(entry.kind):
            return None
        return coded(
            lambda first, end: torch.zeros(end - first, dtype=torch.uint8), entry.kind, (1, self.shape[1])
        )

    def _coded(self, file: GGUFFile) -> CodedWeight:
        weight = file.coded(self.source)
        return weight.chosen_rows(self._order()) if self.heads else weight

    def _plain(self, file: GGUFFile) -> torch.Tensor:
        value = file.tensor(self.source)
        if not bool(value.isfinite().all()):
            raise file.broken(f"tensor {self.source!r} has values that are not finite")
        if self.heads:
            value = value[self._order()]
        return value.add_(self.shift) if self.shift else value

    def _order(self) -> torch.Tensor:
        """Rows by rotary halves instead of pairs: [heads, pairs, 2] -> [heads, 2, pairs]"""
        import torch

        return torch.arange(self.shape[0]).view(self.heads, -1, 2).transpose(1, 2).reshape(-1)


def _quantization(file: GGUFFile, weights: list[_Weight]) -> dict[str, Any]:
    """The part of config.json that describes coded weights. Says which matrices are not coded."""
    from gguf import GGMLQuantizationType

    from skim.models.quantized.planes import describe

    samples = {weight: weight.sample(file) for weight in weights}
    plain = {"F32", "F16", "BF16", "F64"}
    kinds = {
        GGMLQuantizationType(file.tensors[weight.source].kind).name
        for weight, sample in samples.items()
        if sample is None
    }
    if dequantized := sorted(kinds - plain):
        say(f"{file.path.name}: tensors of the types {', '.join(dequantized)} are dequantized to float32")
    found = {
        weight.name.removesuffix(".weight"): sample
        for weight, sample in samples.items()
        if sample is not None
    }
    return {"quantization_config": describe(found)} if found else {}


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
    """Write safetensors, with one tensor in memory at a time."""
    from skim.models.quantized.stream import write_shards

    pieces = [weight.piece(file) for weight in weights]
    total = sum(piece.nbytes for piece in pieces)
    with byte_bar(f"converting {file.path.name}", total, progress) as advance, _one_torch_thread():
        write_shards(directory, pieces, advance)


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
