"""Declarations of settings: their types, limits, docstrings and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from skim.config import EngineConfig, ModelConfig, ServerConfig, parse_bytes
from skim.config.declare import Declared, declared, field_docs, parts
from skim.errors import ConfigError

FIELDS = [(kind, one) for kind in (*parts(EngineConfig).values(), ServerConfig) for one in declared(kind)]


@pytest.mark.parametrize(("kind", "one"), FIELDS, ids=lambda value: getattr(value, "name", ""))
def test_a_refusal_is_about_the_field(kind: type, one: Declared) -> None:
    for wrong in (object(), "", []):
        with pytest.raises(ConfigError, match=f"^{one.name} must ") as caught:
            kind(**{one.name: wrong})
        assert caught.value.fields == (one.name,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "much"}, "kv_memory must be a size.*'much'"),
        ({"kv_memory": "9" * 400}, "kv_memory must be a size.*999"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"block_size": 0}, "block_size must be.*got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs must be.*got -1"),
        ({"dtype": "int3"}, "dtype must be one of.*int3"),
        ({"device": "tpu"}, "device must be.*tpu"),
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**settings)


@pytest.mark.parametrize(
    ("value", "size"),
    [(5, 5), ("5", 5), ("512M", 512 * 2**20), ("1.5GiB", 3 * 2**29), (" 2 kb ", 2048), ("1t", 2**40)],
)
def test_sizes_in_bytes(value: str | int, size: int) -> None:
    assert parse_bytes("kv_memory", value) == size


@pytest.mark.parametrize("value", ["", "0", "-1", "0.5", "M", "1X", "8388608T", True, None, 1.5])
def test_a_malformed_size_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kv_memory must be a size such as '512M' or '4G', got") as caught:
        parse_bytes("kv_memory", value)
    assert caught.value.fields == ("kv_memory",)


@pytest.mark.parametrize("target", ["auto", "float16", "float32"])
@pytest.mark.parametrize("own", [None, "auto", "float16", "bfloat16"])
def test_a_drafter_has_the_targets_dtype_unless_it_has_its_own(target: str, own: str | None) -> None:
    config = EngineConfig.of(
        model="large", dtype=target, drafter_dtype=own, quantization="int4", device="cpu", max_model_len=64
    )
    drafter = config.drafter_model("small")
    assert drafter == ModelConfig(model="small", dtype=own or target, device="cpu")
    assert config.model.dtype == target


def test_a_drafters_dtype_is_one_of_the_targets() -> None:
    with pytest.raises(ConfigError, match=r"drafter_dtype must be one of auto, float32, .* got 'int8'"):
        EngineConfig.of(drafter_dtype="int8")


@dataclasses.dataclass(frozen=True)
class Documented:
    """Settings of which some have a docstring."""

    keep_ratio: float | None = None
    """Part of the prompt
    that is kept."""
    most: int = 10
    """Most of it."""
    least: int = 1


@dataclasses.dataclass
class Odd:
    names: list[str] = dataclasses.field(default_factory=list)


def test_the_docstring_below_a_field_is_its_help() -> None:
    assert field_docs(Documented) == {"keep_ratio": "Part of the prompt that is kept.", "most": "Most of it."}


def test_a_field_of_a_type_that_no_setting_has_is_noticed() -> None:
    with pytest.raises(TypeError, match=r"Odd.names: .*list"):
        declared(Odd)
