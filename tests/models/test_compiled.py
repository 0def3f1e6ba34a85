"""Compiled layers: products that share an input are packed and computed once, with the same results."""

from __future__ import annotations

import operator
import threading

import pytest
import torch
from torch import fx, nn

from skim.attention.hook import FEW_TOKENS
from skim.errors import ModelError
from skim.models.forwards import compiled
from skim.models.forwards.compiled import compile_layers, compiling
from skim.models.forwards.packed import MergeProducts, PackedLinear, PackedPart, bypass, pack_products
from tests import tiny


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_packed_products_compute_the_same(family: str) -> None:
    module = tiny.with_our_attention(family)
    expected = tiny.logits(module, 9)
    held = sum(parameter.nbytes for parameter in module.parameters())
    pack_products(module)
    packed = [part for part in module.modules() if isinstance(part, PackedPart)]
    assert len(packed) >= 3 * module.config.num_hidden_layers
    assert sum(parameter.nbytes for parameter in module.parameters()) == held
    torch.testing.assert_close(tiny.logits(module, 9), expected, rtol=1e-5, atol=1e-5)


def test_products_that_differ_in_input_or_bias_are_not_packed() -> None:
    owner = nn.Module()
    owner.q_proj, owner.k_proj, owner.v_proj = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2, bias=False)
    owner.gate_proj, owner.up_proj = nn.Linear(4, 8), nn.Linear(5, 8)
    pack_products(owner)
    assert not any(isinstance(part, PackedPart) for part in owner.modules())


@pytest.mark.parametrize("tokens", [1, 2, FEW_TOKENS, FEW_TOKENS + 1])
def test_equal_products_are_computed_once_and_others_stay(tokens: int) -> None:
    whole, other = nn.Linear(4, 6), nn.Linear(4, 6)

    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(  # type: ignore[return-value]
            nn.functional.linear(a, w.weight, w.bias)
            for a, w in ((x, whole), (x, whole), (y, whole), (x, other))
        )

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    weights = [graph.placeholder(name) for name in ("w0", "b0", "w1", "b1")]
    products = [
        graph.call_function(nn.functional.linear, (a, *weights[first : first + 2]))
        for a, first in ((x, 0), (x, 0), (y, 0), (x, 2))
    ]
    graph.output(tuple(products))
    for node in products:
        node.meta["example_value"] = torch.empty(1, tokens, 6)
    MergeProducts()(graph)
    graph.lint()
    left = [node.target for node in graph.nodes if node.op == "call_function"]
    own = torch.ops.skim.multiply.default if tokens <= FEW_TOKENS else nn.functional.linear
    assert left == 3 * [own]
    run = fx.GraphModule({}, graph)
    one, two = torch.randn(1, tokens, 4), torch.randn(1, tokens, 4)
    given = (one, two, whole.weight, whole.bias, other.weight, other.bias)
    assert torch.equal(sum(run(*given)), layer(one, two))


@pytest.mark.parametrize("merged", [True, False])
def test_a_product_adds_what_the_layer_returns_and_nothing_else(merged: bool) -> None:
    """Neither a sum that is used again, nor one that is broadcast."""
    graph = fx.Graph()
    x, weight, other = (graph.placeholder(name) for name in ("x", "weight", "other"))
    product = graph.call_function(nn.functional.linear, (x, weight))
    total = graph.call_function(operator.add, (other, product))
    graph.output((total,) if merged else (graph.call_function(torch.relu, (total,)), total))
    other.meta["example_value"] = product.meta["example_value"] = torch.empty(1, 3, 6)
    MergeProducts()(graph)
    graph.lint()
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert (torch.ops.skim.multiply_add.default in called) == merged
    given = torch.randn(1, 3, 4), torch.randn(6, 4), torch.randn(1, 3, 6)
    expected = nn.functional.linear(*given[:2]) + given[2]
    torch.testing.assert_close(fx.GraphModule({}, graph)(*given)[-1], expected)
    broadcast = fx.Graph()
    x, weight, other = (broadcast.placeholder(name) for name in ("x", "weight", "other"))
    product = broadcast.call_function(nn.functional.linear, (x, weight))
    broadcast.output((broadcast.call_function(operator.add, (product, other)),))
    product.meta["example_value"], other.meta["example_value"] = torch.empty(1, 3, 6), torch.empty(6)
    MergeProducts()(broadcast)
    assert torch.ops.skim.multiply_add.default not in [node.target for node in broadcast.nodes]


@pytest.mark.parametrize(
    "kind", ["gated", "swapped", "another activation", "halves cut elsewhere", "used twice"]
)
def test_a_product_computes_the_gate_of_exactly_its_halves(kind: str) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    product = graph.call_function(nn.functional.linear, (x, weight))
    product.meta["example_value"] = torch.empty(1, 3, 8)
    cut = 3 if kind == "halves cut elsewhere" else 4
    halves = [
        graph.call_function(operator.getitem, (product, (Ellipsis, piece)))
        for piece in (slice(0, cut), slice(8 - cut, 8))
    ]
    if kind == "swapped":
        halves.reverse()
    activation = torch.relu if kind == "another activation" else nn.functional.silu
    active = graph.call_function(activation, (halves[0],))
    out = graph.call_function(operator.mul, (active, halves[1]))
    graph.output((out, active) if kind == "used twice" else (out,))
    given = torch.randn(1, 3, 4), torch.randn(8, 4)
    expected = fx.GraphModule({}, graph)(*given)[0]
    MergeProducts()(graph)
    graph.lint()
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert (called == [torch.ops.skim.multiply_gated.default]) == (kind == "gated")
    torch.testing.assert_close(fx.GraphModule({}, graph)(*given)[0], expected)


def test_slow_compiling_is_warned_about_and_a_failure_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "WARN_AFTER", 0.0)
    warned = threading.Event()
    monkeypatch.setattr(compiled.log, "warning", lambda *args: warned.set())
    with compiling("a model"):
        assert warned.wait(5)
    with (
        pytest.raises(
            ModelError, match=r"a model: its layers could not be compiled: no compiler.*enforce_eager"
        ),
        compiling("a model"),
    ):
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def test_compiled_layers_compute_the_same_and_all_layers_share_the_code() -> None:
    module = tiny.with_our_attention("qwen3")
    expected = [tiny.logits(module, tokens) for tokens in (9, 1, 30, 50, 40)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(module)
    compile_layers(module)
    for tokens, want in zip((9, 1, 30, 50, 40), expected, strict=True):
        torch.testing.assert_close(tiny.logits(module, tokens), want, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # one token, few, many
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_head_is_replaced_only_where_it_is_linear_and_can_be_bypassed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tiny.with_our_attention("qwen3")
    compile_layers(module)
    calls: list[torch.Tensor] = []
    product = nn.functional.linear
    monkeypatch.setattr(compiled, "linear", lambda x, *rest: calls.append(x) or product(x, *rest))
    hidden = torch.randn(1, 3, module.config.hidden_size)
    expected = hidden @ module.lm_head.weight.T
    torch.testing.assert_close(module.lm_head(hidden), expected)
    with bypass(module):
        torch.testing.assert_close(module.lm_head(hidden), expected)
    assert len(calls) == 1

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    other = tiny.with_our_attention("qwen3")
    other.lm_head = Scaled(module.config.hidden_size, 8)
    compile_layers(other)
    assert "forward" not in vars(other.lm_head)


def test_packed_products_are_computed_once_per_input_in_any_order_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = nn.Module()
    owner.gate_proj, owner.up_proj = nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)
    weights = owner.gate_proj.weight.detach().clone(), owner.up_proj.weight.detach().clone()
    pack_products(owner)
    calls = []
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: calls.append(1) or forward(self, x))
    one, two = torch.randn(2, 4), torch.randn(2, 4)
    called = [
        (owner.gate_proj, 0, one),
        (owner.up_proj, 1, one),
        (owner.up_proj, 1, two),
        (owner.gate_proj, 0, two),
    ]
    for part, index, hidden in [*called, *called]:
        torch.testing.assert_close(part(hidden), hidden @ weights[index].T)
    assert len(calls) == 2 * 3  # once in order; twice when the last part is called first
    owner.up_proj(one)
    assert owner.gate_proj.packed._cached is None
    assert owner.gate_proj.packed is owner.up_proj.packed


def test_every_form_of_a_product_can_be_compiled() -> None:
    """With keyword arguments, a strided bias, a column-major weight and a vector as weight."""
    weight, vector, bias = torch.randn(6, 4), torch.randn(4), torch.randn(12)

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            nn.functional.linear(input=x, weight=weight, bias=bias[::2]),
            nn.functional.linear(x, weight.T.contiguous().T),
            nn.functional.linear(x, vector),
        )

    run = torch.compile(layer, dynamic=True, options=dict(compiled.OPTIONS))
    for tokens in (1, 5):
        x = torch.randn(1, tokens, 4)
        for got, want in zip(run(x), layer(x), strict=True):
            torch.testing.assert_close(got, want)
