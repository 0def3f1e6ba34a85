"""Modules with coded weights are built one weight at a time, and compute with the restored weights."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from skim import LLM, SamplingParams
from skim.config import ModelConfig
from skim.errors import ModelError
from skim.models.load import LoadedModel, load
from skim.models.quantized import build
from skim.models.quantized.module import Coded, CodedEmbedding, CodedLinear
from skim.models.quantized.write import write_quantized
from skim.models.shapes import build_shape
from tests import tiny
from tests.models.quantized.weights import SelfAttention

FAMILIES = [name for name in tiny.CONFIGS if name != "gpt_oss"]
TOKENS = torch.tensor([list(range(65, 95))])


def loaded(path: Path, quantization: str) -> LoadedModel:
    return load(path, ModelConfig(model=str(path), device="cpu", quantization=quantization))


def restored(module: Any) -> dict[str, torch.Tensor]:
    """The module's weights by their names in the plain module."""
    found: dict[str, torch.Tensor] = {}
    for name, part in module.named_modules():
        if isinstance(part, Coded):
            found[f"{name}.weight"] = part.coded.restore()
            if isinstance(part, CodedLinear) and part.bias is not None:
                found[f"{name}.bias"] = part.bias
        else:
            own = {**part._parameters, **part._buffers}
            found |= {f"{name}.{key}".strip("."): value for key, value in own.items() if value is not None}
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_a_family_computes_with_its_restored_weights(
    family: str, quantization: str, tmp_path: Path, logits_of: Callable[[Any], torch.Tensor]
) -> None:
    path = tiny.save(family, tmp_path)
    coded = loaded(path, quantization)
    layers = [part for part in coded.module.base_model.layers.modules() if isinstance(part, CodedLinear)]
    assert len(layers) == 7 * 4
    assert not any(type(part) is nn.Linear for part in coded.module.modules())
    plain = loaded(path, "none")
    values = restored(coded.module)
    for name, value in plain.module.state_dict().items():
        error = (values[name] - value).norm() / value.norm().clamp_min(1e-9)
        assert float(error) < {"int4": 0.12, "int8": 0.02, "fp8": 0.04}[quantization]
    plain.module.load_state_dict(values, strict=False)
    torch.testing.assert_close(logits_of(coded.module), logits_of(plain.module), rtol=1e-4, atol=1e-4)


@pytest.fixture
def logits_of() -> Callable[[Any], torch.Tensor]:
    def run(module: Any) -> torch.Tensor:
        with torch.inference_mode():
            output = module(input_ids=TOKENS, use_cache=False, skim_step=SelfAttention())
        return output.logits  # type: ignore[no-any-return]

    return run


def test_a_tied_head_shares_the_codes_of_the_embeddings(tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    _drop(path, "lm_head.weight")
    module = loaded(path, "int4").module
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert isinstance(table, CodedEmbedding)
    assert isinstance(head, CodedLinear)
    assert table.bits == head.bits == 8
    assert table.low.data_ptr() == head.low.data_ptr()


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_an_engine_with_codes_writes_what_one_with_the_restored_weights_does(
    quantization: str, tmp_path: Path
) -> None:
    path = tiny.save("qwen3", tmp_path)
    values = restored(loaded(path, quantization).module)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [list(range(first, first + 50)) for first in range(40, 140, 20)]
    replies = []
    for how in (quantization, "none"):
        with LLM(str(path), kv_memory="16M", device="cpu", quantization=how) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        replies.append([output.outputs[0].token_ids for output in outputs])
        [file] = path.glob("*.safetensors")
        save_file({name: values[name].clone() for name in load_file(file)}, file, metadata={"format": "pt"})
    assert replies[0] == replies[1]


def test_weights_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.save("llama", tmp_path)
    seen: list[Any] = []
    read = build._Filler._value

    def note(self: Any, name: str) -> torch.Tensor:
        alive = [one for one in (ref() for ref in seen) if one is not None]
        assert all(one.dim() < 2 or one.numel() == tiny.VOCAB * 64 for one in alive), "a float copy was kept"
        value = read(self, name)
        seen.append(weakref.ref(value))
        return value

    monkeypatch.setattr(build._Filler, "_value", note)
    loaded(path, "int4")
    assert len(seen) > 20


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    _drop(path, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"1 tensors.*model\.layers\.2\.mlp\.up_proj\.weight"):
        loaded(path, "int4")


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 12, 13]}))
    assert loaded(path, "none").eos_token_ids == loaded(path, "int8").eos_token_ids == {257, 12, 13}


def test_plain_weights_are_plain_whatever_the_config_promises(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    plain = loaded(path, "auto").module.state_dict()
    config = json.loads((path / "config.json").read_text())
    promise = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (path / "config.json").write_text(json.dumps(config | promise))
    found = loaded(path, "auto").module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_a_head_that_equals_the_table_is_tied(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    [file] = path.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    module = loaded(path, "int4").module
    assert module.get_input_embeddings().low.data_ptr() == module.get_output_embeddings().low.data_ptr()


def test_families_whose_weights_are_merged_are_loaded_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    write_quantized(tmp_path / "model", "model", "int8", tmp_path / "copy", progress=False)
    plain = loaded(tmp_path / "model", "none").module
    for path, quantization in (("model", "int8"), ("copy", "auto"), ("copy", "int8")):
        module = loaded(tmp_path / path, quantization).module
        if quantization == "int8":
            table, head = module.get_input_embeddings(), module.get_output_embeddings()
            assert isinstance(table, CodedEmbedding)
            assert table.low.data_ptr() == head.low.data_ptr()
        values = restored(module)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=2e-3)


def test_other_threads_make_ordinary_modules_meanwhile() -> None:
    with ThreadPoolExecutor(1) as thread, build._without_parameters():
        other = thread.submit(lambda: nn.Linear(2, 3)).result()
        assert nn.Linear(2, 3).weight.is_meta
    assert not other.weight.is_meta
    assert not nn.Linear(2, 3).weight.is_meta


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cpu_multiplies_codes_in_other_dtypes(dtype: str, tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(path), kv_memory="16M", device="cpu", dtype=dtype, quantization="int8") as llm:
        [output] = llm.generate([list(range(65, 95))], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_a_shape_is_quantized_weight_by_weight(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", **tiny.CONFIGS["qwen3"]().to_dict()}))
    model = build_shape(str(file), ModelConfig(device="cpu", quantization="int4"))
    again = build_shape(str(file), ModelConfig(device="cpu", quantization="int4"))
    ones, others = restored(model.module), restored(again.module)
    assert ones.keys() == others.keys()
    assert all(torch.equal(ones[name], others[name]) for name in ones)
    bits = {part.bits for part in model.module.base_model.layers.modules() if isinstance(part, Coded)}
    assert bits == {4}


def _drop(path: Path, name: str) -> None:
    [file] = path.glob("*.safetensors")
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
