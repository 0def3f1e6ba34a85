"""Lean layers compute what transformers' layers do; layers that would not are left unchanged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig

from skim import LLM, SamplingParams
from skim.attention import hook
from skim.models.forwards import few_tokens, lean
from skim.models.forwards.few_tokens import FEW_TOKENS, PLAIN, NativeOps, Ops, for_few_tokens
from skim.models.forwards.lean import Lean, LeanHead, lean_layers
from skim.models.forwards.packed import bypass, pack_products
from skim.native.build import NativeUnavailable
from tests import tiny

LEAN = {"llama", "qwen2", "qwen3", "mistral"}
SMALL = st.integers(1, 6)


@cache
def native_ops() -> NativeOps:
    try:
        return NativeOps()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def native() -> NativeOps:
    return native_ops()


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# -- the native operations against torch's


@given(
    tokens=st.integers(1, FEW_TOKENS + 5),
    inner=st.integers(1, 140),
    outer=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_products(tokens: int, inner: int, outer: int, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    given_, weight, bias = random(tokens, inner), random(outer, inner), random(outer) if biased else None
    got = native_ops().product(given_, weight, bias)
    expected = PLAIN.product(given_.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@given(tokens=st.integers(1, FEW_TOKENS), inner=st.integers(1, 140), outer=st.integers(1, 300))
def test_a_tokens_product_is_bit_identical_in_any_batch_and_with_any_number_of_threads(
    tokens: int, inner: int, outer: int
) -> None:
    native = native_ops()
    given_, weight = random(tokens, inner), random(outer, inner)
    together = native.product(given_, weight, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        for token in range(tokens):
            alone = native.product(given_[token : token + 1].clone(), weight, None)
            assert torch.equal(alone[0], together[token])
    finally:
        torch.set_num_threads(threads)


@given(tokens=SMALL, width=st.integers(1, 100), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_norms(tokens: int, width: int, scale: float) -> None:
    native = native_ops()
    hidden, other, weight = random(tokens, width) * scale, random(tokens, width), random(width)
    close(native.norm(hidden, weight, 1e-6), PLAIN.norm(hidden, weight, 1e-6))
    ours, theirs = hidden.clone(), hidden.clone()
    close(native.add_norm(ours, other, weight, 1e-5), PLAIN.add_norm(theirs, other, weight, 1e-5))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, hidden + other)


@given(tokens=SMALL, heads=SMALL, more=st.integers(0, 3), half=st.integers(1, 40))
def test_heads_are_normed_and_rotated_in_place_and_the_others_are_unchanged(
    tokens: int, heads: int, more: int, half: int
) -> None:
    native = native_ops()
    dim = 2 * half
    new, weight = random(tokens, heads + more, dim), random(dim)
    angles = random(tokens, half).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    before = new.clone()
    expected = PLAIN.rotate(PLAIN.norm_heads(new[:, :heads], weight, 1e-6), cos, sin)
    got = native.rotate(native.norm_heads(new[:, :heads], weight, 1e-6), cos, sin)
    close(got, expected)
    assert got.data_ptr() == new.data_ptr()
    assert torch.equal(new[:, heads:], before[:, heads:])


@given(tokens=SMALL, inner=st.integers(1, 70), scale=st.sampled_from([1.0, 30.0, 1000.0]))
def test_gates(tokens: int, inner: int, scale: float) -> None:
    both = random(tokens, 2 * inner) * scale
    torch.testing.assert_close(native_ops().gate(both), PLAIN.gate(both), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_propagate_within_their_token_only(native: NativeOps, bad: float) -> None:
    hidden, weight, wide = random(3, 32), random(32), random(80, 32)
    hidden[1, 5] = bad
    results = [
        native.product(hidden, wide, None),
        native.norm(hidden, weight, 1e-6),
        native.gate(hidden),
        native.rotate(hidden.clone().view(3, 2, 16), torch.ones(3, 16), torch.ones(3, 16)).flatten(1),
    ]
    for result in results:
        assert not result[1].isfinite().all()
        assert result[[0, 2]].isfinite().all()


# -- layers


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    chosen: Ops = for_few_tokens() if request.param == "native" and native_ops() else PLAIN
    assert (chosen is PLAIN) == (request.param == "torch")
    monkeypatch.setattr(lean, "for_few_tokens", lambda: chosen)
    return chosen


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_layers_of_the_common_kind_become_lean_and_compute_the_same(family: str, ops: Ops) -> None:
    module = tiny.with_our_attention(family)
    sizes = (1, 7, FEW_TOKENS, FEW_TOKENS + 1, 60)
    expected = [tiny.logits(module, tokens) for tokens in sizes]
    held = sum(parameter.nbytes for parameter in module.parameters())
    layers = module.config.num_hidden_layers
    assert lean_layers(module) == (layers if family in LEAN else 0)
    assert lean_layers(module) == (layers if family in LEAN else 0)
    assert sum(parameter.nbytes for parameter in module.parameters()) == held
    for tokens, want in zip(sizes, expected, strict=True):
        close(tiny.logits(module, tokens), want)


def test_the_output_projection_is_lean_if_layers_are() -> None:
    lean_ones, others = tiny.with_our_attention("llama"), tiny.with_our_attention("gemma3")
    assert lean_layers(lean_ones) == 4
    assert lean_layers(others) == 0
    head = lean_ones.get_output_embeddings()
    assert isinstance(vars(head)["forward"], LeanHead)
    assert "forward" not in vars(others.get_output_embeddings())
    for shape in ((1, 3, 64), (3, 64), (1, 40, 64), (1, 0, 64)):
        hidden = random(*shape)
        close(head(hidden), nn.Linear.forward(head, hidden))


def change_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def change_norm(layer: Any) -> None:
    plain = type(layer.input_layernorm).forward
    layer.input_layernorm.forward = lambda hidden: plain(layer.input_layernorm, hidden) * 1.01


def change_rotation(layer: Any) -> None:
    plain = type(layer.self_attn).forward

    def unrotated(hidden_states: torch.Tensor, position_embeddings: Any, **others: Any) -> Any:
        cos, sin = position_embeddings
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return plain(layer.self_attn, hidden_states, position_embeddings=still, **others)

    layer.self_attn.forward = unrotated


def change_far_positions(layer: Any) -> None:
    plain = type(layer.self_attn).forward

    def scaled(hidden_states: torch.Tensor, position_ids: torch.Tensor, **others: Any) -> Any:
        far = (position_ids[..., None] > 500).float()
        return plain(layer.self_attn, hidden_states * (1 + far), position_ids=position_ids, **others)

    layer.self_attn.forward = scaled


def add_a_part(layer: Any) -> None:
    layer.extra = nn.Identity()


@pytest.mark.parametrize(
    "change", [change_activation, change_norm, change_rotation, change_far_positions, add_a_part]
)
def test_a_layer_that_computes_something_else_is_unchanged(change: Any) -> None:
    module = tiny.with_our_attention("llama")
    change(module.model.layers[2])
    expected = [tiny.logits(module, tokens) for tokens in (1, 5, 40)]
    assert lean_layers(module) == 3
    assert "forward" not in vars(module.model.layers[2])
    for tokens, want in zip((1, 5, 40), expected, strict=True):
        close(tiny.logits(module, tokens), want)


def test_a_family_with_the_same_parts_and_a_residual_multiplier_is_unchanged() -> None:
    hook.register()
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        residual_multiplier=0.7,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=hook.NAME).eval()
    assert lean_layers(module) == 0


def test_a_model_whose_trial_run_fails_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny.with_our_attention("llama")

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("not today")

    module.model.norm.forward = broken
    with caplog.at_level(logging.INFO, logger="skim"):
        assert lean_layers(module) == 0
    assert "not today" in caplog.text


def test_the_trial_does_not_depend_on_embeddings_that_may_be_zero() -> None:
    module = tiny.with_our_attention("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[:20] = 0.0
    for layer in module.model.layers:
        change_activation(layer)
    assert lean_layers(module) == 0


def test_rotary_embeddings_of_the_wrong_size_are_refused_before_native_code_reads_them() -> None:
    module = tiny.with_our_attention("llama")
    layer = module.model.layers[1]
    plain = type(layer.self_attn).forward

    def half_rotated(hidden_states: torch.Tensor, position_embeddings: Any, **others: Any) -> Any:
        whole = tuple(torch.cat((half, half), dim=-1) for half in position_embeddings)
        return plain(layer.self_attn, hidden_states, position_embeddings=whole, **others)

    layer.self_attn.forward = half_rotated
    trial = lean._Trial(layer, for_few_tokens())
    pack_products(layer)
    given = {"position_embeddings": tuple(torch.randn(2, 1, 3, layer.self_attn.head_dim // 2))}
    trial(random(1, 3, 64), **given)
    assert trial.agreed is None


def test_layers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.with_our_attention("llama")
    change_activation(module.model.layers[0])
    assert lean_layers(module) == 3
    monkeypatch.setattr(lean, "_try", lambda *_: pytest.fail("tried again"))
    assert lean_layers(module) == 3


def test_parameters_stay_parameters() -> None:
    module = tiny.with_our_attention("llama")
    assert lean_layers(module) == 4
    assert not any(parameter.is_inference() for parameter in module.parameters())


def test_results_are_float32_whatever_torchs_default_dtype(native: NativeOps) -> None:
    hidden, weight, width = random(3, 32), random(80, 32), random(32)
    expected = native.product(hidden, weight, None), native.norm(hidden, width, 1e-6), native.gate(hidden)
    torch.set_default_dtype(torch.float64)
    try:
        got = native.product(hidden, weight, None), native.norm(hidden, width, 1e-6), native.gate(hidden)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


class Wrong(NativeOps):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return super().gate(both) * (1.001 if len(both) == 7 else 1.0)


class Forgetful(NativeOps):
    def product(self, given: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return super().product(given, weight, bias).nan_to_num()


@pytest.mark.parametrize(
    ("ops", "reason"), [(Wrong, "differ from torch's for 7"), (Forgetful, "loses a NaN")]
)
@pytest.mark.usefixtures("native")
def test_wrong_operations_are_not_used(
    ops: type[NativeOps], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(few_tokens, "NativeOps", ops)
    with caplog.at_level(logging.INFO, logger="skim"):
        assert few_tokens.for_few_tokens.__wrapped__() is PLAIN
    assert reason in caplog.text


def test_models_in_other_dtypes_are_unchanged() -> None:
    module = tiny.with_our_attention("llama").to(torch.bfloat16)
    assert lean_layers(module) == 0
    assert not any("forward" in vars(part) for part in module.modules())


def test_without_a_step_transformers_own_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.with_our_attention("llama")
    module.set_attn_implementation("sdpa")
    ids = torch.arange(65, 75)[None]
    with torch.inference_mode():
        expected = module(ids).logits
        module.set_attn_implementation(hook.NAME)
        assert lean_layers(module) == 4
        module.set_attn_implementation("sdpa")
        monkeypatch.setattr(NativeOps, "product", lambda *_: pytest.fail("not transformers' own"))
        with bypass(module):
            close(module(ids).logits, expected)


def test_a_nan_is_not_lost() -> None:
    module = tiny.with_our_attention("qwen3")
    assert lean_layers(module) == 4
    with torch.no_grad():
        module.model.embed_tokens.weight[66, 3] = float("nan")
    assert tiny.logits(module, 3)[0, 1:].isnan().all()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", "no-such-compiler")
    few_tokens.for_few_tokens.cache_clear()
    yield
    few_tokens.for_few_tokens.cache_clear()


def test_without_a_compiler_torchs_operations_are_used(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    module = tiny.with_our_attention("llama")
    expected = tiny.logits(module, 3)
    with caplog.at_level(logging.INFO, logger="skim"):
        assert lean_layers(module) == 4
    assert "no C compiler found" in caplog.text
    close(tiny.logits(module, 3), expected)


def test_an_engines_layers_are_lean_unless_it_is_eager(tmp_path: Any) -> None:
    path = tiny.save("qwen3", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [list(range(65, 65 + length)) for length in (3, 40, 11)]
    tokens = []
    for eager in (False, True):
        with LLM(path, progress=False, kv_memory="8M", device="cpu", enforce_eager=eager) as llm:
            layers = [part for part in llm.engine.model.module.modules() if "forward" in vars(part)]
            assert any(isinstance(vars(layer)["forward"], Lean) for layer in layers) == (not eager)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
