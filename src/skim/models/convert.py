"""A GGUF file becomes a transformers directory: config, float32 safetensors, tokenizer, chat template.

Each architecture is a table of its tensors and a few settings. Nothing is dropped in silence: a tensor
without a place, a missing one, one of another shape, or a setting that would change the result and has no
counterpart in transformers stops the conversion with its name.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skim.errors import ModelError
from skim.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    import torch

CONVERSION_VERSION = 1
"""Part of every cache key; raise it when the output of a conversion changes."""

MAX_SHARD_BYTES = 2 * 10**9

# gguf name -> (transformers name, dimensions): (v)ocabulary, (e)mbedding, (f)eed-forward, (q)uery rows,
# (k)ey and value rows, (d) of one head
_Table = dict[str, tuple[str, str]]
_LAYER: _Table = {
    "attn_norm.weight": ("input_layernorm.weight", "e"),
    "attn_q.weight": ("self_attn.q_proj.weight", "qe"),
    "attn_k.weight": ("self_attn.k_proj.weight", "ke"),
    "attn_v.weight": ("self_attn.v_proj.weight", "ke"),
    "attn_output.weight": ("self_attn.o_proj.weight", "eq"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "fe"),
    "ffn_up.weight": ("mlp.up_proj.weight", "fe"),
    "ffn_down.weight": ("mlp.down_proj.weight", "ef"),
}
_TWO_NORMS: _Table = _LAYER | {"ffn_norm.weight": ("post_attention_layernorm.weight", "e")}
_FOUR_NORMS: _Table = _LAYER | {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "e"),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "e"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "e"),
}
_QKV_BIAS: _Table = {
    "attn_q.bias": ("self_attn.q_proj.bias", "q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "k"),
    "attn_v.bias": ("self_attn.v_proj.bias", "k"),
}
_QK_NORM: _Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "d"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "d"),
}


@dataclass(frozen=True)
class Architecture:
    """What Skim knows of one GGUF architecture."""

    model_type: str
    class_name: str
    layer: _Table
    extra: dict[str, Any] = field(default_factory=dict)
    """Config entries that GGUF leaves to the reader."""
    rotary_interleaved: bool = False
    """The file's query and key rows pair neighbours; transformers pairs the two halves of a head."""
    norm_offset: bool = False
    """The file's norm weights have the 1 added that transformers adds itself."""
    sliding_period: int = 0
    """Every n-th layer is full attention, the others slide; 0: all are full."""
    largest_depth: int = 0
    """Depth of the one size whose queries are scaled by hidden size over heads, not by the head's size."""


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _TWO_NORMS, {"hidden_act": "silu"}, rotary_interleaved=True
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _TWO_NORMS | _QKV_BIAS, {"hidden_act": "silu"}),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", _TWO_NORMS | _QK_NORM, {"hidden_act": "silu", "attention_bias": False}
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _FOUR_NORMS,
        _GEMMA,
        norm_offset=True,
        sliding_period=2,
        largest_depth=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _FOUR_NORMS | _QK_NORM,
        _GEMMA,
        norm_offset=True,
        sliding_period=6,
        largest_depth=62,
    ),
}
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"}


def convert(path: Path, directory: Path, *, progress: bool = True) -> None:
    """Write the model in the GGUF file `path` into the existing, empty `directory`."""
    with GGUFFile(path) as file:
        name = str(file.metadata.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise ModelError(
                f"{path} has the architecture {name!r}, which Skim cannot convert; supported: "
                f"{', '.join(ARCHITECTURES)}; use a safetensors directory of this model"
            )
        settings = _Settings(file, name)
        config = build_config(file, ARCHITECTURES[name], settings)
        plan = _plan(file, ARCHITECTURES[name], config)
        settings.refuse_unread()
        vocabulary = Vocabulary.of(file)
        _write_json(directory / "config.json", config | vocabulary.ids)
        endings = vocabulary.ids | {"eos_token_id": vocabulary.endings()}
        _write_json(directory / "generation_config.json", endings)
        write_tokenizer(vocabulary, directory, config["max_position_embeddings"])
        _write_weights(file, plan, directory, progress)


class _Settings:
    """The architecture's own metadata. Remembers what was read, so that what was not can be refused."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._path = file.path
        self._prefix = prefix + "."
        start = len(self._prefix)
        self._left = {key[start:]: v for key, v in file.metadata.items() if key.startswith(self._prefix)}

    def get(self, key: str, default: Any = None) -> Any:
        """A per-layer list with one value throughout counts as that value."""
        value = self._left.pop(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """The file has float32; 1e-05 is meant where that reads 9.999999747378752e-06."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(key, value)
        return float(f"{value:.7g}")

    def refusal(self, key: str, value: object) -> ModelError:
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(
            f"{self._path}: {self._prefix}{key} {shown}, which Skim cannot convert; "
            "use a safetensors directory of this model"
        )

    def refuse_unread(self) -> None:
        for key, value in self._left.items():
            if key not in _HARMLESS and value and value != "none":
                raise self.refusal(key, value)


def build_config(file: GGUFFile, arch: Architecture, settings: _Settings) -> dict[str, Any]:
    """The config.json of the model, its special token ids apart."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(
            f"{file.path} has no tensor 'token_embd.weight'; give the GGUF file of a whole language model"
        )
    hidden, heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := settings.count(key, head_dim)) != head_dim:
            raise settings.refusal(key, value)
    layers, context = settings.count("block_count"), settings.count("context_length")
    if layers > len(file.tensors):
        raise file.broken(f"it claims {layers} layers and has {len(file.tensors)} tensors")
    config = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "dtype": "float32",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, settings, head_dim),
    } | arch.extra
    window = settings.get("attention.sliding_window")
    if arch.sliding_period:
        config |= _sliding(arch, settings, config, window)
    elif arch.model_type == "llama":
        config |= _llama_flavour(file, window)
        window = config.get("sliding_window", window)
    if window and window < context and "sliding_window" not in config:
        raise settings.refusal("attention.sliding_window", window)
    return config


def _llama_flavour(file: GGUFFile, window: int | None) -> dict[str, Any]:
    """GGUF files Mistral models as llama; their window and biases are the only differences."""
    if "mistral" in str(file.metadata.get("general.name", "")).lower():
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window or None,
        }
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def _sliding(
    arch: Architecture, settings: _Settings, config: dict[str, Any], window: int | None
) -> dict[str, Any]:
    """What Gemma needs besides: which layers slide, softcaps, the query scale, two rotary bases."""
    if not window:
        raise settings.refusal("attention.sliding_window", window)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    period = settings.count("attention.sliding_window_pattern", arch.sliding_period)
    scale = (
        head_dim if layers != arch.largest_depth else config["hidden_size"] // config["num_attention_heads"]
    )
    two_caps = arch.model_type == "gemma2"
    extra = {
        "sliding_window": window,
        "layer_types": [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
        ],
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": settings.get("attn_logit_softcapping", 50.0 if two_caps else None),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0 if two_caps else None),
    }
    if not two_caps:
        local = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base_swa", 10_000.0)}
        extra["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return extra


def _rope(file: GGUFFile, settings: _Settings, head_dim: int) -> dict[str, Any]:
    theta = settings.real("rope.freq_base", 10_000.0)
    linear = settings.get("rope.scale_linear")
    kind = settings.get("rope.scaling.type", "linear" if linear and linear != 1 else "none")
    factor = settings.real("rope.scaling.factor", linear or 1.0)
    original = settings.get("rope.scaling.original_context_length")
    rope = {"rope_type": "default", "rope_theta": theta}
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise settings.refusal("rope.scaling.type", f"{kind} beside the tensor rope_freqs.weight")
        return rope | _llama3_rope(file, theta, head_dim)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and isinstance(original, int):
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": settings.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind != "none":
        raise settings.refusal("rope.scaling.type", f"{kind} (factor {factor}, original context {original})")
    return rope


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The file holds the divisors that Llama 3's rule gave; accept them if the rule gives them again."""
    found = [float(value) for value in file.tensor("rope_freqs.weight")]
    factor, low, high, original = max(found), 1.0, 4.0, 8192
    expected = []
    for i in range(head_dim // 2):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - blend) / factor + blend))
    close = len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=False)
    )
    if not close:
        raise ModelError(
            f"{file.path}: the tensor 'rope_freqs.weight' does not follow Llama 3's scaling rule, which "
            "Skim cannot convert; use a safetensors directory of this model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


@dataclass(frozen=True)
class _Weight:
    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    """Bring the rotary pairs of that many heads into transformers' order."""
    shift: float = 0.0

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def load(self, file: GGUFFile) -> torch.Tensor:
        value = file.tensor(self.source)
        if self.heads:  # [heads, pairs, 2, ...] -> [heads, 2, pairs, ...]
            value = value.view(self.heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(self.shape)
        return value.add_(self.shift) if self.shift else value.contiguous()


def _plan(file: GGUFFile, arch: Architecture, config: dict[str, Any]) -> list[_Weight]:
    """Which tensor of the file becomes which of the model: every one, each once, each of the right shape."""
    head_dim = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = {
        "v": config["vocab_size"],
        "e": config["hidden_size"],
        "f": config["intermediate_size"],
        "q": heads * head_dim,
        "k": kv_heads * head_dim,
        "d": head_dim,
    }
    table = {
        "token_embd.weight": ("model.embed_tokens.weight", "ve"),
        "output_norm.weight": ("model.norm.weight", "e"),
    }
    if not config["tie_word_embeddings"]:
        table["output.weight"] = ("lm_head.weight", "ve")
    layer = dict(arch.layer)
    if config.get("attention_bias"):
        layer |= _QKV_BIAS | {"attn_output.bias": ("self_attn.o_proj.bias", "e")}
    for i in range(config["num_hidden_layers"]):
        table |= {f"blk.{i}.{key}": (f"model.layers.{i}.{name}", dims) for key, (name, dims) in layer.items()}

    missing = [name for name in table if name not in file.tensors]
    unknown = [name for name in file.tensors if name not in table and name != "rope_freqs.weight"]
    for what, names in (("lacks the tensor", missing), ("has no place for the tensor", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{file.path}: a {arch.model_type} model {what} {names[0]!r}{more}; "
                "use another GGUF file or a safetensors directory of this model"
            )
    plan = []
    for source, (name, dims) in table.items():
        shape = tuple(size[d] for d in dims)
        if file.tensors[source].shape != shape:
            raise file.broken(
                f"{source!r} has the shape {list(file.tensors[source].shape)}, not {list(shape)}"
            )
        turned = (
            {"q": heads, "k": kv_heads}.get(dims[0], 0)
            if arch.rotary_interleaved and "attn_v" not in source
            else 0
        )
        shift = -1.0 if arch.norm_offset and source.endswith("norm.weight") else 0.0
        plan.append(_Weight(source, name, shape, turned, shift))
    return plan


def _write_weights(file: GGUFFile, plan: list[_Weight], directory: Path, progress: bool) -> None:
    """Float32 safetensors, one tensor in memory at a time."""
    shards: list[list[_Weight]] = [[]]
    for weight in plan:
        if shards[-1] and sum(w.nbytes for w in shards[-1]) + weight.nbytes > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(weight)
    total = sum(weight.nbytes for weight in plan)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        _write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": where},
        )
    with progress_bar(f"converting {file.path.name}", total, progress) as advance, _one_torch_thread():
        for name, shard in zip(names, shards, strict=True):
            _write_shard(file, shard, directory / name, advance)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Decoding is bound by memory; on a busy machine torch's threads wait for each other 20 times longer."""
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


@contextlib.contextmanager
def progress_bar(label: str, total: int, enabled: bool) -> Iterator[Callable[[int], object]]:
    """Count bytes on stderr: a bar on a terminal, one line elsewhere, nothing when not enabled."""
    if enabled and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
        ) as bar:
            yield bar.update
        return
    if enabled:
        print(f"{label} ...", file=sys.stderr, flush=True)
    yield lambda _: None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Byte-level BPE: how a text is cut before merging, by the name GGUF gives it. None is GPT-2's own rule.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST))
_QWEN2 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _REST))
_CUTS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_CONTROL, _USER_DEFINED = 3, 4
_END_OF_TURN = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
    ),
    *("<|eot|>", "<|END_OF_TURN_TOKEN|>"),
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    file: GGUFFile
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    """`bos_token_id`, `eos_token_id`, `pad_token_id`: those the file names."""

    @classmethod
    def of(cls, file: GGUFFile) -> Vocabulary:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise ModelError(
                f"{file.path} has no tokenizer.ggml.tokens; give a GGUF file that holds its vocabulary"
            )
        types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens):
            raise file.broken(f"tokenizer.ggml.token_type does not fit {len(tokens)} tokens")
        ids = {}
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            value = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if value is None:
                continue
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                raise file.broken(f"tokenizer.ggml.{theirs}_token_id is {value!r} of {len(tokens)} tokens")
            ids[f"{ours}_token_id"] = value
        return cls(file, tokens, types, ids)

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.{key}", default)

    def endings(self) -> list[int]:
        """Every token that ends a turn, the file's own first."""
        named = [self.ids.get("eos_token_id"), self.get("ggml.eot_token_id"), self.get("ggml.eom_token_id")]
        by_text = [i for i, kind in self.marked() if self.tokens[i] in _END_OF_TURN]
        return list(
            dict.fromkeys(i for i in [*named, *by_text] if isinstance(i, int) and i < len(self.tokens))
        )

    def marked(self) -> list[tuple[int, int]]:
        """(id, type) of the control and user-defined tokens, which stand for themselves in a text."""
        return [(i, kind) for i, kind in enumerate(self.types) if kind in (_CONTROL, _USER_DEFINED)]


def write_tokenizer(vocabulary: Vocabulary, directory: Path, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template.

    Byte-level BPE is built here, which is many times faster than transformers' reading of GGUF and cuts
    digits where the model expects it; other kinds (SentencePiece, unigram) go through transformers.
    """
    from tokenizers import processors

    kind, pre = vocabulary.get("ggml.model"), vocabulary.get("ggml.pre", "default")
    if kind == "gpt2" and pre in _CUTS:
        tokenizer = _byte_level_bpe(vocabulary, pre)
    else:
        tokenizer = _through_transformers(vocabulary)
    bos = vocabulary.ids.get("bos_token_id")
    if bos is not None and vocabulary.get("ggml.add_bos_token", kind == "llama" or _CUTS.get(pre) == _LLAMA3):
        text = vocabulary.tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, bos)]
        )
    tokenizer.add_tokens(_added_tokens(vocabulary))
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {key.removesuffix("_id"): vocabulary.tokens[i] for key, i in vocabulary.ids.items()}
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **named,
        },
    )
    if template := vocabulary.get("chat_template"):
        (directory / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _added_tokens(vocabulary: Vocabulary) -> list[Any]:
    """Control tokens are hidden from decoded text; user-defined ones (`<tool_call>`) are part of it."""
    from tokenizers import AddedToken

    endings = set(vocabulary.endings())
    return [
        AddedToken(vocabulary.tokens[i], special=kind == _CONTROL or i in endings, normalized=False)
        for i, kind in vocabulary.marked()
    ]


def _byte_level_bpe(vocabulary: Vocabulary, pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.get("ggml.merges", [])]
    if len(ids) != len(vocabulary.tokens) or not all(len(merge) == 2 for merge in merges):
        raise vocabulary.file.broken("its vocabulary repeats a token or has a merge that is not a pair")
    llama3, pattern = _CUTS[pre] == _LLAMA3, _CUTS[pre]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=llama3))
    except Exception as error:  # tokenizers raises bare Exception
        raise vocabulary.file.broken(f"its merges do not fit its vocabulary ({error})") from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _through_transformers(vocabulary: Vocabulary) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = vocabulary.file.path
    try:
        made = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        kind = f"{vocabulary.get('ggml.model')!r}/{vocabulary.get('ggml.pre')!r}"
        raise ModelError(
            f"{path}: its tokenizer ({kind}) cannot be converted "
            f"({type(error).__name__}: {str(error)[:160]}); "
            "use a safetensors directory of this model"
        ) from error
    tokenizer = made.backend_tokenizer
    for i in {0, len(vocabulary.tokens) // 2, len(vocabulary.tokens) - 1}:
        if tokenizer.id_to_token(i) != vocabulary.tokens[i]:
            raise vocabulary.file.broken(f"token {i} came out as {tokenizer.id_to_token(i)!r}")
    return tokenizer
