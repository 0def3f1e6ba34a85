"""Converted GGUF files have the same weights, tokenizer and logits; broken ones are refused."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from skim.errors import ModelError
from skim.models import bundled
from skim.models.gguf import config as gguf_config
from skim.models.gguf import convert
from skim.models.gguf.file import GGUFFile
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.source import prepare
from tests.models.quantized.restored import restored_model

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]
MERGED = ["he", "ll", "hell", "hello", "Ġhello", "12", "123"]
CONTROL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VOCABULARY = [*BYTES, *MERGED, *CONTROL, "<tool_call>"]
BOS, EOS = VOCABULARY.index("<|begin|>"), VOCABULARY.index("<|im_end|>")

COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 50_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA = {
    "sliding_window": 8,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}

# name -> (gguf architecture, transformers model type, config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "llama-untied-bias": ("llama", "llama", {"rope_parameters": ROPE, "attention_bias": True}),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "mistral": ("llama", "mistral", {"rope_parameters": ROPE, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": ROPE}),
    "qwen2-yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", GEMMA | {"rope_parameters": ROPE}),
    "gemma2-untied": ("gemma2", "gemma2", GEMMA | {"rope_parameters": ROPE, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {"rope_parameters": GEMMA3_ROPE}),
}


def reference_model(model_type: str, config: dict[str, Any]) -> Any:
    """A random transformers model; no parameter has its initial value."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **({"num_hidden_layers": 2} | COMMON | config))
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows as llama.cpp's converter does for queries and keys of the llama architecture."""
    rows = torch.arange(weight.shape[0]).view(heads, 2, -1).transpose(1, 2).reshape(-1)
    return weight[rows]


def write_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    types = [3 if token in CONTROL else 4 if token == "<tool_call>" else 1 for token in VOCABULARY]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def write_gguf(path: Path, family: str, *, pre: str = "gpt-2", edit: Any = None) -> Any:
    """Write the family's random model the way llama.cpp's converter does; returns the model."""
    arch, model_type, overrides = FAMILIES[family]
    model = reference_model(model_type, overrides)
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Mistral tiny" if model_type == "mistral" else "tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    write_vocabulary(writer, pre)

    enum = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = value.detach()
        if arch == "llama" and ".q_proj." in name:
            value = interleaved(value, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            value = interleaved(value, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensors[known or name.replace("lm_head", "output")] = value.numpy()
    if rope["rope_type"] == "llama3":
        inverse = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        tensors["rope_freqs.weight"] = (inverse / model.model.rotary_emb.inv_freq).numpy()
    if edit is not None:
        edit(writer, tensors)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SKIM_CACHE", str(cache))
    return cache


def files_under(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_has_the_logits_of_the_original(
    family: str, tmp_path: Path, empty_cache: Path
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family)
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    converted = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    assert converted.config.model_type == FAMILIES[family][1]
    ids = torch.randint(0, len(VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def quantized(kind: str) -> Any:
    """Quantize all matrices of a file that is being written."""

    def edit(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
        for name, value in list(tensors.items()):
            if value.ndim == 2:
                writer.add_tensor(
                    name,
                    quants.quantize(value, GGMLQuantizationType[kind]),
                    raw_dtype=GGMLQuantizationType[kind],
                )
                del tensors[name]

    return edit


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_converted_model_keeps_its_codes(family: str, kind: str, tmp_path: Path, empty_cache: Path) -> None:
    """Its logits are those of the original with the same rounded weights."""
    model = write_gguf(tmp_path / "tiny.gguf", family, edit=quantized(kind))
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                raw = quants.quantize(value.numpy(), GGMLQuantizationType[kind])
                value.copy_(torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind])))
    checkpoint = Checkpoint(directory, "tiny")
    matrices = {name for name, value in model.named_parameters() if value.ndim == 2}
    assert {name for name in checkpoint.names() if checkpoint.is_coded(name)} == matrices
    ids = torch.randint(0, len(VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        converted = restored_model(directory)(ids).logits
        torch.testing.assert_close(converted, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_types_that_are_not_covered_are_restored_and_named(
    tmp_path: Path, empty_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def one(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
        kind = GGMLQuantizationType.IQ4_NL
        raw = np.random.default_rng(0).integers(0, 255, (96, 36), dtype=np.uint8)
        raw.reshape(-1, 18)[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        del tensors["blk.1.ffn_up.weight"]
        writer.add_tensor("blk.1.ffn_up.weight", raw, raw_dtype=kind)

    write_gguf(tmp_path / "tiny.gguf", "qwen2", edit=one)
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    assert "tiny.gguf: tensors of the types IQ4_NL are dequantized to float32" in capfd.readouterr().err
    assert Checkpoint(directory, "tiny").format is None
    assert Checkpoint(directory, "tiny").plain("model.layers.1.mlp.up_proj.weight").dtype == torch.float32


def test_a_large_model_is_written_in_shards_with_an_index(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skim.models.quantized.stream.MAX_SHARD_BYTES", 60_000)
    model = write_gguf(tmp_path / "tiny.gguf", "qwen3")
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    found = {name: tensor for shard in shards for name, tensor in load_file(directory / shard).items()}
    assert {name for name in model.state_dict() if name != "lm_head.weight"} == set(found)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q5_0", "TQ1_0", "IQ4_NL"])
def test_decoding_equals_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """The last two represent the formats that this package decodes for us."""
    kind_number = GGMLQuantizationType[kind]
    generator = np.random.default_rng(0)
    if kind == "IQ4_NL":
        raw = generator.integers(0, 255, (6, 512 // 32 * 18), dtype=np.uint8)
        raw.reshape(-1, 18)[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    else:
        raw = quants.quantize(generator.normal(size=(6, 512)).astype(np.float32), kind_number)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "one.gguf") as file:
        value = file.tensor("x")
    assert value.dtype == torch.float32
    np.testing.assert_array_equal(value.numpy(), quants.dequantize(raw, kind_number).reshape(6, 512))


def test_the_bundled_weights_equal_the_values_in_the_file(default_model_dir: Path) -> None:
    reader = gguf.GGUFReader(bundled.gguf_path(progress=False))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.29.attn_k.weight": "model.layers.29.self_attn.k_proj.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
    }
    checkpoint = Checkpoint(default_model_dir, "default")
    assert checkpoint.format == "skim"
    assert len(checkpoint.names()) == len(stored)
    for theirs, ours in names.items():
        expected = torch.from_numpy(quants.dequantize(stored[theirs].data, stored[theirs].tensor_type).copy())
        assert checkpoint.is_coded(ours) == ("norm" not in theirs)
        value = checkpoint.coded(ours).restore() if checkpoint.is_coded(ours) else checkpoint.plain(ours)
        if "attn_q" in theirs or "attn_k" in theirs:
            value = interleaved(value, 9 if "attn_q" in theirs else 3)
        assert torch.equal(value, expected), ours
    size = (default_model_dir / "model.safetensors").stat().st_size
    assert size < bundled.SIZE


def test_the_bundled_model_answers(default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    model = restored_model(default_model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1].item() in model.generation_config.eos_token_id
    assert model.config.max_position_embeddings == 8192
    assert model.config.rms_norm_eps == 1e-5


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(default_model_dir)


def test_the_bundled_tokenizer_splits_numbers_into_digits(tokenizer: Any) -> None:
    assert " ".join(tokenizer.tokenize("in 2024, 16979")) == "in Ġ 2 0 2 4 , Ġ 1 6 9 7 9"
    assert tokenizer.tokenize("Hello world's end") == ["Hello", "Ġworld", "'s", "Ġend"]


def test_special_tokens_are_one_id_and_hidden_on_request(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert tokenizer.decode([3], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


# SmolLM2's vocabulary has no token for these control characters, nor for characters above plane 3.
SPELLABLE = st.characters(
    exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
)


@given(st.text(SPELLABLE, max_size=80))
@settings(max_examples=300)
def test_the_bundled_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "hello 123", ["hello", "Ġ", "123"]),
        ("smollm", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("qwen2", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "hello 1234", ["<|begin|>", "hello", "Ġ", "123", "4"]),
        ("default", "hello<tool_call> hello", ["hello", "<tool_call>", "Ġhello"]),
    ],
)
def test_each_pre_tokenizer_splits_as_it_should(
    pre: str, text: str, tokens: list[str], tmp_path: Path, empty_cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2" if pre == "qwen2" else "llama", pre=pre)
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    for loader in (PreTrainedTokenizerFast, AutoTokenizer):
        tokenizer = loader.from_pretrained(directory)
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
        assert (
            tokenizer.decode(tokenizer("a<tool_call>").input_ids, skip_special_tokens=True) == "a<tool_call>"
        )
    endings = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert endings == [EOS, VOCABULARY.index("<|endoftext|>")]


def test_a_sentencepiece_vocabulary_goes_through_transformers(tmp_path: Path, empty_cache: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "hi", "▁hi"]
    pieces += [f"<unused{i}>" for i in range(len(VOCABULARY) - len(pieces) - 1)] + ["<end_of_turn>"]
    marks = {"<unk>": 2, "<s>": 3, "</s>": 3, "<end_of_turn>": 3}

    def sentencepiece(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
        pairs = writer.kv_data[0]
        for key in [key for key in pairs if key.startswith("tokenizer.")]:
            del pairs[key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
        kinds = [marks.get(piece, 6 if piece.startswith("<0x") else 1) for piece in pieces]
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)

    write_gguf(tmp_path / "tiny.gguf", "gemma3", edit=sentencepiece)
    directory = prepare(str(tmp_path / "tiny.gguf"), progress=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    ids = tokenizer("hi hi é<end_of_turn>").input_ids
    assert ids[0] == 1
    assert ids[-1] == len(pieces) - 1
    assert pieces.index("▁hi") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi hi é"
    endings = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert endings == [2, len(pieces) - 1]


def bad_setting(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    writer.add_float32("llama.logit_scale", 0.5)


def extra_tensor(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_gate_inp.weight"] = np.zeros((4, 64), np.float32)


def lost_tensor(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def wrong_shape(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_up.weight"] = np.zeros((95, 64), np.float32)


def sizes_beyond_memory(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    for key in ("embedding_length", "feed_forward_length"):
        writer.kv_data[0][f"llama.{key}"].value = 2**31


def strange_rope(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    tensors["rope_freqs.weight"] = np.linspace(1, 7, 8, dtype=np.float32)


def longrope(writer: gguf.GGUFWriter, tensors: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (bad_setting, "llama.logit_scale is 0.5"),
        (extra_tensor, "blk.0.ffn_gate_inp.weight"),
        (lost_tensor, "blk.1.ffn_up.weight"),
        (wrong_shape, r"\[95, 64\], not \[96, 64\]"),
        (sizes_beyond_memory, "its settings make no llama model"),
        (strange_rope, "rope_freqs.weight"),
        (longrope, "rope.scaling.type is longrope"),
    ],
)
def test_unconvertible_files_are_refused_and_the_cause_is_named(
    edit: Any, named: str, tmp_path: Path, empty_cache: Path
) -> None:
    write_gguf(tmp_path / "odd.gguf", "llama", edit=edit)
    with pytest.raises(ModelError, match=f"odd.gguf.*{named}.*; (use|download)"):
        prepare(str(tmp_path / "odd.gguf"), progress=False)
    assert files_under(empty_cache) == []


def test_an_unsupported_architecture_names_the_supported_ones(tmp_path: Path, empty_cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "mamba")
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mamba'.*llama, qwen2, qwen3, gemma2, gemma3"):
        prepare(str(tmp_path / "odd.gguf"), progress=False)
    assert files_under(empty_cache) == []


def test_a_file_truncated_anywhere_is_refused(tmp_path: Path, empty_cache: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "llama")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    pick = random.Random(0)
    lengths = [0, 1, 3, 4, 5, 8, 23, 24, 25, *(pick.randrange(4, len(whole) - 32) for _ in range(150))]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf.*(download it again|give a \.gguf file)"):
            prepare(str(cut), progress=False)
    assert files_under(empty_cache) == []


def test_corrupt_header_bytes_raise_nothing_but_model_errors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "llama")
    whole = (tmp_path / "whole.gguf").read_bytes()
    pick = random.Random(0)
    out = tmp_path / "out"
    refused = 0
    for attempt in range(150):
        data = bytearray(whole)
        for _ in range(pick.randrange(1, 4)):
            data[pick.randrange(4, 2000)] = pick.randrange(256)
        damaged = tmp_path / f"damaged{attempt}.gguf"
        damaged.write_bytes(data)
        directory = out / str(attempt)
        directory.mkdir(parents=True)
        try:
            convert.convert(damaged, directory, progress=False)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "GGUF version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims 1152921504606846976 metadata"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + b"x" * 64, "needs 4611686018427387904 bytes"),
    ],
)
def test_unreadable_gguf_files_are_refused(
    content: bytes, message: str, tmp_path: Path, empty_cache: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"model.gguf.*{message}"):
        prepare(str(path), progress=False)
    assert files_under(empty_cache) == []


def test_llama3_scaling_of_the_released_sizes_is_recognised() -> None:
    """Follows the published rule, with factor 32 and head size 64 as in Llama 3.2."""

    class OneTensor:
        path = Path("x.gguf")

        def tensor(self, name: str) -> torch.Tensor:
            divisors = []
            for i in range(32):
                wavelength = 2 * math.pi * 500_000.0 ** (2 * i / 64)
                smooth = (8192 / wavelength - 1) / 3
                middle = 1 / ((1 - smooth) / 32 + smooth)
                divisors.append(1.0 if wavelength < 2048 else 32.0 if wavelength > 8192 else middle)
            return torch.tensor(divisors)

    rope = gguf_config._llama3_rope(OneTensor(), 500_000.0, 64)  # type: ignore[arg-type]
    assert rope["factor"] == 32.0
