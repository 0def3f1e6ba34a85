"""Layers as they are compiled for a GPU: weights laid together, products computed once, the same numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx, nn

from skim.errors import ModelError
from skim.models.forwards import compiled
from skim.models.forwards.compiled import compile_layers, compiling
from skim.models.forwards.packed import MergeProducts, Part, Whole, pack_products
from tests import tiny


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_weights_laid_together_compute_the_same(family: str) -> None:
    module = tiny.with_our_attention(family)
    expected = tiny.logits(module, 9)
    held = sum(parameter.nbytes for parameter in module.parameters())
    pack_products(module)
    packed = [part for part in module.modules() if isinstance(part, Part)]
    assert len(packed) >= 3 * module.config.num_hidden_layers
    assert sum(parameter.nbytes for parameter in module.parameters()) == held
    torch.testing.assert_close(tiny.logits(module, 9), expected, rtol=1e-5, atol=1e-5)


def test_products_that_differ_in_their_input_or_bias_are_left_alone() -> None:
    owner = nn.Module()
    owner.q_proj, owner.k_proj, owner.v_proj = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2, bias=False)
    owner.gate_proj, owner.up_proj = nn.Linear(4, 8), nn.Linear(5, 8)
    pack_products(owner)
    assert not any(isinstance(part, Part) for part in owner.modules())


@pytest.mark.parametrize("tokens", [1, 2])
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
    assert left == 3 * [torch.ops.skim.multiply_one.default if tokens == 1 else nn.functional.linear]
    run = fx.GraphModule({}, graph)
    one, two = torch.randn(1, tokens, 4), torch.randn(1, tokens, 4)
    given = (one, two, whole.weight, whole.bias, other.weight, other.bias)
    assert torch.equal(sum(run(*given)), layer(one, two))


def test_whoever_waits_long_is_told_once_and_a_failure_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "PATIENCE", 0.0)
    told = threading.Event()
    monkeypatch.setattr(compiled.log, "warning", lambda *args: told.set())
    with compiling("a model"):
        assert told.wait(5)
    with (
        pytest.raises(
            ModelError, match=r"a model: its layers could not be compiled: no compiler.*enforce_eager"
        ),
        compiling("a model"),
    ):
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def test_compiled_layers_compute_the_same_and_all_layers_share_the_code() -> None:
    module = tiny.with_our_attention("qwen3")
    expected = [tiny.logits(module, tokens) for tokens in (9, 1, 30)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(module)
    compile_layers(module)
    for tokens, want in zip((9, 1, 30), expected, strict=True):
        torch.testing.assert_close(tiny.logits(module, tokens), want, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one token, and any other number
    assert not torch._dynamo.utils.counters["graph_break"]


def test_products_of_one_input_are_computed_once_in_any_order_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = nn.Module()
    owner.gate_proj, owner.up_proj = nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)
    weights = owner.gate_proj.weight.detach().clone(), owner.up_proj.weight.detach().clone()
    pack_products(owner)
    calls = []
    forward = Whole.forward
    monkeypatch.setattr(Whole, "forward", lambda self, x: calls.append(1) or forward(self, x))
    one, two = torch.randn(2, 4), torch.randn(2, 4)
    asked = [
        (owner.gate_proj, 0, one),
        (owner.up_proj, 1, one),
        (owner.up_proj, 1, two),
        (owner.gate_proj, 0, two),
    ]
    for part, index, hidden in [*asked, *asked]:
        torch.testing.assert_close(part(hidden), hidden @ weights[index].T)
    assert len(calls) == 2 * 3  # in the wrong order, the last part being asked for first, twice
    owner.up_proj(one)
    assert owner.gate_proj.whole._computed is None
    assert owner.gate_proj.whole is owner.up_proj.whole


def test_any_product_that_looks_like_one_of_one_token_can_be_compiled() -> None:
    """By keywords, with a weight that is a vector or lies in no usual way."""
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
