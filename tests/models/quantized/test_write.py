"""A written checkpoint is read back as it was quantized, and follows the documented format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skim.cli.main import main
from skim.errors import ModelError
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.quantized.quantize import quantize
from skim.models.quantized.write import write_quantized
from tests import tiny
from tests.models.quantized import packers
from tests.models.quantized.restored import restored, restored_model

HOWS = ["int4", "int8"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path / "plain")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_what_is_written_is_what_was_quantized(how: str, family: str, tmp_path: Path) -> None:
    source = tiny.save(family, tmp_path / "plain")
    write_quantized(source, "tiny", how, tmp_path / "new", progress=False)
    before, after = Checkpoint(source, "tiny"), Checkpoint(tmp_path / "new", "tiny")
    assert after.format == "compressed-tensors"
    assert after.names() == before.names()
    coded = {name for name in after.names() if after.is_coded(name)}
    group = 64 if family == "gpt_oss" else 32  # its layers with 96 columns are experts, which stay plain
    assert {name.split(".")[-2] for name in coded} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name in after.names():
        if name not in coded:
            assert torch.equal(after.plain(name), before.plain(name))
            continue
        expected = quantize(before.plain(name), how, group=group)
        found = after.coded(name)
        assert (found.bits, found.group, found.zero) == (expected.bits, expected.group, expected.zero)
        assert found.planes.keys() == expected.planes.keys()
        assert all(torch.equal(found.planes[plane], expected.planes[plane]) for plane in found.planes)


@pytest.mark.parametrize("how", HOWS)
def test_the_files_follow_the_documented_format(how: str, plain: Path, tmp_path: Path) -> None:
    """Compared with the plain packer, which knows nothing of the writer."""
    write_quantized(plain, "tiny", how, tmp_path / "new", progress=False)
    module = "model.layers.1.mlp.down_proj"
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    weight = Checkpoint(tmp_path / "new", "tiny").coded(f"{module}.weight")
    zeros = weight.offset if weight.offset is not None else torch.full(weight.scale.shape, weight.zero)
    codes, index = weight.codes().numpy().astype(np.int64), np.arange(96) // 32
    source = packers.Source(weight.bits, 32, codes, weight.scale, zeros.numpy().astype(np.int64), index)
    expected, settings = packers.compressed(source, symmetric=how == "int8")
    for ending, value in expected.items():
        assert torch.equal(tensors[f"{module}.{ending}"], value), ending
    written = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    for key in ("quant_method", "format", "quantization_status"):
        assert written[key] == settings[key]
    group = written["config_groups"]["group_0"]
    assert settings["config_groups"]["group_0"]["weights"].items() <= group["weights"].items()
    assert group["targets"] == ["Linear"]
    assert written["ignore"] == ["lm_head"]


def test_the_copy_has_the_tokenizer_and_nearly_the_logits(plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, "tiny", "int8", tmp_path / "new", progress=False)
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert not (tmp_path / "new" / "model.safetensors.index.json").exists()
    before, after = restored_model(plain), restored_model(tmp_path / "new")
    ids = torch.arange(65, 105)[None]
    with torch.no_grad():
        difference = (before(ids).logits - after(ids).logits).abs().max()
    assert difference < 0.05 * before(ids).logits.abs().max()


def test_a_large_copy_is_written_in_shards(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(plain, "tiny", "int4", tmp_path / "one", progress=False)
    monkeypatch.setattr("skim.models.quantized.stream.MAX_SHARD_BYTES", 40_000)
    write_quantized(plain, "tiny", "int4", tmp_path / "many", progress=False)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = Checkpoint(tmp_path / "one", "one"), Checkpoint(tmp_path / "many", "many")
    found, expected = restored(many), restored(one)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_layers_whose_columns_do_not_fit_stay_plain(tmp_path: Path) -> None:
    model = tiny.build("llama")
    odd = torch.nn.Linear(72, 64, bias=False)
    config = type(model.config)(**{**model.config.to_dict(), "intermediate_size": 72})
    made = type(model)(config)
    assert made.model.layers[0].mlp.down_proj.weight.shape == odd.weight.shape
    made.save_pretrained(tmp_path / "plain")
    write_quantized(tmp_path / "plain", "tiny", "int4", tmp_path / "new", progress=False)
    after = Checkpoint(tmp_path / "new", "tiny")
    assert after.is_coded("model.layers.0.mlp.up_proj.weight")
    assert not after.is_coded("model.layers.0.mlp.down_proj.weight")
    ignored = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.down_proj" in ignored


def test_a_failure_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "new"
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(plain)
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.up_proj.weight has values that are not finite"):
        write_quantized(plain, "tiny", "int4", target, progress=False)
    assert list(target.parent.iterdir()) == []


def test_an_existing_directory_is_not_touched(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="mine exists and is not empty; name a new directory"):
        write_quantized(plain, "tiny", "int4", tmp_path / "mine", progress=False)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_pull_writes_a_quantized_copy(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert main(["pull", "--quantize", "int4", str(plain), str(new)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{new}\n"
    assert re.search(r"\d MiB of weights instead of [\d.]+ MiB$", shown.err.strip())
    again = tmp_path / "again"
    assert main(["pull", "--quantize", "int8", str(new), str(again)]) == 0
    assert "the model's own format is smaller" in capsys.readouterr().err
    assert Checkpoint(new, "tiny").format == "compressed-tensors"
    assert main(["pull", "--quantize", "int4", str(plain), str(new)]) == 3
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["some", "new"], "DIR needs --quantize int4 or int8"),
        (["some", "--quantize", "int4"], "--quantize needs MODEL and DIR"),
    ],
)
def test_quantize_and_its_directory_need_each_other(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", *arguments]) == 2
    assert message in capsys.readouterr().err
