"""Prepared directories of every family load; unsupported and damaged models are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaForSequenceClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)

from skim import LLM, SamplingParams
from skim.attention import hook
from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError
from skim.models import load as load_module
from skim.models.load import load, pick_device
from skim.models.numbers import check_numbers
from skim.models.probe import ShapeProbe, probe_layers
from skim.models.shapes import shape_config
from skim.models.sizes import WeightStats
from tests import tiny


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    path = tiny.save(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    prompt = list(range(65, 115))
    with torch.inference_mode():
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    with LLM(str(path), kv_memory="16M", max_num_batched_tokens=20, device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]


def test_a_recurrent_model_is_refused_by_name(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    for window in (None, 128):
        config.max_position_embeddings = window
        MambaForCausalLM(config).save_pretrained(tmp_path)
        tiny.tokenizer().save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="unsupported architecture 'mamba'"):
            load(tmp_path, ModelConfig(model=str(tmp_path), device="cpu"))


def test_recurrent_state_beside_attention_is_refused() -> None:
    """Every layer attends, and every layer also has a recurrent state."""
    config = FalconH1Config(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        max_position_embeddings=256,
    )
    with pytest.raises(ModelError, match="remembers earlier tokens outside"):
        probe_layers(with_our_attention(config), "mine")


def test_weights_with_a_nan_are_refused(tmp_path: Path) -> None:
    module = tiny.build("llama")
    with torch.no_grad():
        module.base_model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    hook.register()
    module.set_attn_implementation(hook.NAME)
    with pytest.raises(ModelError, match=r"mine: its logits are not finite in torch.float32.*another dtype"):
        probe_layers(module, "mine")


@pytest.mark.parametrize(
    ("family", "windows"),
    [("qwen3", [None] * 4), ("mistral", [tiny.WINDOW] * 4), ("gemma3", [tiny.WINDOW, None] * 2)],
)
def test_the_probe_finds_each_layers_sliding_window(family: str, windows: list[int | None]) -> None:
    layers = probe_layers(tiny.with_our_attention(family), "mine")
    assert [layer.window for layer in layers] == windows


def test_a_sliding_window_known_only_to_the_mask_is_refused() -> None:
    config = Qwen2MoeConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=0,
    )
    with pytest.raises(ModelError, match="sliding window of 24 tokens is not passed"):
        probe_layers(with_our_attention(config), "mine")


def with_our_attention(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    hook.register()
    return AutoModelForCausalLM.from_config(config, attn_implementation=hook.NAME).eval().float()


@pytest.mark.parametrize(
    "damage",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "many"},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"vocab_size": 17},
    ],
    ids=lambda d: next(iter(d)),
)
def test_an_invalid_config_is_a_model_error(damage: dict[str, Any], tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | damage))
    with pytest.raises(ModelError, match="mine: "):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [-1, 0, 2**63, 10**400])
def test_a_number_that_no_model_can_have_is_named(field: str, value: int, tmp_path: Path) -> None:
    """Before anything else is read: the directory has nothing but a config."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", field: value}))
    with pytest.raises(
        ModelError, match=f"mine: {field} in its config.json must be .* got .*fetch"
    ) as caught:
        load(tmp_path, ModelConfig(model="mine", device="cpu"))
    assert len(str(caught.value)) < 300
    with pytest.raises(ModelError, match=f"{field} in its config.json"):
        shape_config(str(tmp_path))


def test_numbers_of_nested_configs_are_checked_and_others_left_alone(tmp_path: Path) -> None:
    nested = tmp_path / "config.json"
    nested.write_text(json.dumps({"text_config": {"head_dim": -3}}))
    with pytest.raises(ModelError, match=r"text_config\.head_dim .* got -3; mend it"):
        check_numbers(nested, "mine", "mend it")
    for text in ("{", "[1]", '{"head_dim": null, "vocab_size": "x", "eos_token_id": -1}', "[" * 100_000):
        nested.write_text(text)
        check_numbers(nested, "mine", "mend it")
    check_numbers(tmp_path / "absent.json", "mine", "mend it")


def test_an_architecture_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "quux"}))
    with pytest.raises(ModelError, match="quux"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(kind: str, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": kind, "factor": 2.0}
    config["rope_parameters"] |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config["rope_parameters"]["original_max_position_embeddings"] = 512
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"'{kind}' depends on the other requests in the batch"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


def test_attention_with_an_unknown_argument_is_refused() -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    states = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="passes position_bias to its attention"):
        hook.attention(module, states, states, states, None, skim_step=ShapeProbe(), position_bias=states)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["own", "t5", "bloom"])
def test_an_unsupported_architecture_is_named_with_supported_ones(kind: str, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(
        ModelError, match=f"^mine: unsupported architecture '{kind}'.*; choose a decoder-only model.*Llama"
    ):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


def test_a_pickle_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    tiny.save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    read: list[object] = []
    monkeypatch.setattr(torch, "load", lambda *given, **_: read.append(given))
    with pytest.raises(ModelError, match="mine: cannot load its weights"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))
    assert not read


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        ModelError, match=f"mine: cannot load its weights.*fetch the files in {tmp_path} again"
    ):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_a_model_without_an_output_projection_is_refused(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    kind(AutoConfig.from_pretrained(tmp_path, tie_word_embeddings=False)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"saved as a {kind.__name__} and lacks lm_head.weight.*; choose"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


def test_other_missing_weights_are_not_mistaken_for_a_missing_output_projection(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.save("llama", tmp_path)
    LlamaModel(AutoConfig.from_pretrained(tmp_path, tie_word_embeddings=False)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"its weight files lack 2 tensors.*fetch the files"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="mine: cannot read its tokenizer"):
        load(tmp_path, ModelConfig(model="mine", device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda")


def test_a_format_that_takes_more_than_the_file_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    load_module._warn_if_larger(tmp_path, "small", "int8", WeightStats(900, 8.0))
    assert not caplog.messages
    load_module._warn_if_larger(tmp_path, "small", "int8", WeightStats(1001, 8.0))
    assert "small takes 0.0 MiB in int8" in caplog.text
    assert "leave the quantization at auto" in caplog.text
