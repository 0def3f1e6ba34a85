"""Shapes: models of known sizes with random weights, built with the core dependencies alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skim.cli.bench.models import _load, choices_of
from skim.cli.main import parse
from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError
from skim.models import shapes
from skim.models.shapes import SHAPES, build_shape, shape_config, word_tokenizer
from skim.prefill.scoring.calibration import calibration_of
from skim.prefill.scoring.drafter import Drafter
from tests import tiny

PARAMETERS = {  # as their publishers count them
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-3-4b": 3_880_263_168,  # the text model: 3,209 million, and its embedding table
}
CORE = ("torch", "transformers", "numpy", "safetensors", "tokenizers")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shape")
    tiny.CONFIGS["llama"]().save_pretrained(directory)
    return directory / "config.json"


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_the_parameters_of_the_real_models(shape: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape_config(shape))
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[shape]


def test_a_shape_is_a_loaded_model(config_file: Path) -> None:
    model = build_shape(str(config_file), ModelConfig(device="cpu", dtype="float16"))
    assert model.module.dtype == model.dtype == torch.float16
    assert not model.module.training
    assert (model.max_positions, model.vocab_size, len(model.layers)) == (1024, tiny.VOCAB, 4)
    assert calibration_of(model).model == ""  # no calibration, only the default guess
    same = build_shape(str(config_file.parent), ModelConfig(device="cpu", dtype="float16"))
    pairs = zip(model.module.parameters(), same.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_random_weights_allow_any_context_window(config_file: Path) -> None:
    wide = build_shape(str(config_file), ModelConfig(device="cpu", max_model_len=4096))
    assert wide.max_positions == 4096
    assert build_shape(str(config_file), ModelConfig(device="cpu", max_model_len=100)).max_positions == 1024


def test_a_shapes_drafter_shares_its_token_ids(config_file: Path) -> None:
    config = ModelConfig(device="cpu")
    target = build_shape(str(config_file), config)
    drafter = build_shape(str(config_file), config, seed=1, tokenizer_of=target)
    assert Drafter(drafter.module, drafter.tokenizer, target.tokenizer).shares_tokens
    one, other = next(iter(target.module.parameters())), next(iter(drafter.module.parameters()))
    assert not torch.equal(one, other)


def test_a_shapes_tokenizer_has_a_word_for_every_id() -> None:
    tokenizer = word_tokenizer(300)
    ids = [0, 7, 299]
    assert tokenizer.decode(ids) == "w0 w7 w299"
    assert tokenizer.encode("w0 w7 w299", add_special_tokens=False) == ids
    assert len(tokenizer) == 300


def test_an_unknown_shape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'qwen9'.*qwen3-8b"):
        build_shape("qwen9", ModelConfig(device="cpu"))
    wrong = tmp_path / "config.json"
    wrong.write_text(json.dumps({"model_type": "no such family"}))
    with pytest.raises(ModelError, match="not a config that transformers knows"):
        build_shape(str(wrong), ModelConfig(device="cpu"))


def test_a_shape_is_measured_with_the_core_dependencies_alone(config_file: Path) -> None:
    """Only Skim's own imports are checked; transformers brings its dependencies."""
    program = f"""
import builtins, sys
real, core = builtins.__import__, {CORE!r}
def checked(name, scope=None, *rest, **more):
    ours = str((scope or {{}}).get("__name__")).startswith("skim")
    if ours and name.split(".")[0] not in (*sys.stdlib_module_names, "skim", "", *core):
        raise ImportError("blocked: " + name, name=name)
    return real(name, scope, *rest, **more)
builtins.__import__ = checked
from skim.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    options = ["bench", "ttft", "--shape", str(config_file), "--drafter-shape", str(config_file)]
    options += ["--contexts", "300", "--modes", "dense", "blend:0.1", "--repeats", "1", "--kv-memory", "8M"]
    found = subprocess.run(
        [sys.executable, "-c", program, *options], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr
    *_, head, dense, sparse = found.stdout.splitlines()
    assert head.split()[:6] == ["context", "mode", "state", "n", "ttft", "[ms]"]
    assert [line.split()[:3] for line in (dense, sparse)] == [
        ["300", "dense", "cold"],
        ["300", "blend:0.1", "cold"],
    ]


def test_a_measured_drafter_has_its_own_dtype_and_format(config_file: Path) -> None:
    shape = str(config_file)
    options = ["--dtype", "float32", "--drafter-dtype", "bfloat16", "--drafter-quantization", "int8"]
    args = parse(["bench", "ttft", "--shape", shape, "--drafter-shape", shape, "--device", "cpu", *options])
    [choice] = choices_of(args)
    model, drafter = _load(choice, None, args.drafter_shape)
    assert drafter is not None
    assert (model.dtype, drafter.dtype) == (torch.float32, torch.bfloat16)
    assert drafter.weights.bits < 16 < model.weights.bits


def test_weights_that_do_not_fit_are_refused_before_they_are_made(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "free_bytes", lambda _: 2**30)
    with pytest.raises(ModelError, match=r"qwen3-8b: its weights take 15.26 GiB in torch.bfloat16.*1.00 GiB"):
        build_shape("qwen3-8b", ModelConfig(device="cpu", dtype="bfloat16"))
    build_shape(str(config_file), ModelConfig(device="cpu"))
