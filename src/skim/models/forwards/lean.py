"""Lean forwards of decoder layers. On a CPU a small operation costs more to launch than to compute.

transformers runs about sixty operations per layer besides the matrix products. In most families they compute
RMS norms, rotary embeddings and a gated MLP, and ten are enough. Such layers are not recognised by class:
when an engine starts, both forwards run on the same input. A layer whose results differ keeps transformers'
forward, with packed products.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from skim.attention.step import Attention, AttentionCall, Ranking, Step, Tail
from skim.errors import first_line
from skim.models.forwards.eight_bits import for_ranking
from skim.models.forwards.few_tokens import FEW_TOKENS, PLAIN, Ops, for_few_tokens
from skim.models.forwards.many_tokens import for_many_tokens
from skim.models.forwards.native_layer import NativeLayer
from skim.models.forwards.packed import PackedPart, pack_products
from skim.models.forwards.parts import HEAD_NORMS, Heads, Parts, Product
from skim.models.quantized.module import CodedLinear

log = logging.getLogger(__name__)

TRIAL_TOKENS = (3, 7, 5, 3)  # placed at both ends of the context window
TOLERANCE = 1e-4  # of the trial: far above rounding errors, far below any real difference

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def lean_layers(module: Any) -> int:
    """Give decoder layers a lean forward where it computes the same; return how many have one.

    Only on a CPU and in float32. The trial runs in a short-lived thread: OpenMP keeps a worker pool for every
    thread that has computed.
    """
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    new = [layer for layer in layers if not hasattr(layer, "skim_tried") and _may_be_lean(layer)]
    if new and module.device.type == "cpu" and module.dtype == torch.float32:
        with ThreadPoolExecutor(1, thread_name_prefix="skim-lean") as thread:
            thread.submit(_try, module, new).result()
    return sum(isinstance(vars(layer).get("forward"), Lean) for layer in layers)


class Lean:
    """A layer's lean forward."""

    def __init__(self, layer: Any, call: AttentionCall, few: Ops) -> None:
        self.plain = partial(type(layer).forward, layer)
        self._few = few
        self._many = PLAIN if few is PLAIN else for_many_tokens()
        self._index = int(layer.self_attn.layer_idx)
        self._last = self._index == int(layer.self_attn.config.num_hidden_layers) - 1
        self._call = call
        self._ranking_call = replace(call, rounds=True)
        self._parts = Parts(layer)
        self._native = None if few is PLAIN else NativeLayer.of(self._parts)

    @property
    def rounds(self) -> bool:
        """True if products of forwards that only rank are computed in 8 bits, and attention may round."""
        return for_ranking() is not PLAIN

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, width]
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        skim_step: Attention | None = None,
        **others: Any,
    ) -> Any:
        if skim_step is None or attention_mask is not None or position_embeddings is None:
            return self.plain(
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                skim_step=skim_step,
                **others,
            )
        hidden, parts, call = hidden_states[0], self._parts, self._call
        tokens = hidden.shape[0]
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        if 0 < tokens <= FEW_TOKENS and hidden.is_contiguous():
            if (native := self._native) is not None:
                heads = native.begin(hidden, cos.contiguous(), sin.contiguous())
                attended = skim_step.attend(self._index, *heads, call)
                return native.end(attended.contiguous(), hidden)[None]
            ops = self._few
        else:
            ops = for_ranking() if isinstance(skim_step, Ranking) else PLAIN
            if ops is PLAIN:
                ops = self._many
            else:
                call = self._ranking_call
        heads = parts.begin(ops, hidden, cos, sin)
        if self._last and isinstance(skim_step, Step):
            tail = skim_step.tail
            if tail is not None and skim_step.store(self._index, *heads[1:]):
                return self._end_tail(tail, heads, hidden)[None]
        attended = skim_step.attend(self._index, *heads, call)
        return parts.end(ops, attended.reshape(tokens, -1), hidden)[None]

    def _end_tail(self, tail: Tail, heads: Heads, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output for tokens whose hidden state is read; 0 for the others. [tokens, width]"""
        out = torch.zeros_like(hidden)
        count = len(tail.tokens)
        if count:
            ops = self._few if count <= FEW_TOKENS else self._many
            query, key, value = (part.index_select(0, tail.tokens) for part in heads)
            attended = tail.step.attend(self._index, query, key, value, self._call).reshape(count, -1)
            out[tail.tokens] = self._parts.end(ops, attended, hidden.index_select(0, tail.tokens))
        return out


class WholeList(nn.ModuleList):
    """A list of layers. transformers slices it in every forward, which builds another list of modules."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


class LeanHead:
    """Forward of the output projection, which computes the logits."""

    bypass = False  # True: compute as transformers does

    def __init__(self, head: Any, few: Ops) -> None:
        self.plain = partial(type(head).forward, head)
        self._few = few
        self._product = Product(head)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.bypass or not 0 < flat.shape[0] <= FEW_TOKENS or hidden.dtype != torch.float32:
            return self.plain(hidden)  # type: ignore[no-any-return]
        return self._product(self._few, flat.contiguous()).view(*hidden.shape[:-1], -1)


# -- which layers are lean


def _may_be_lean(layer: Any) -> bool:
    """True if the layer has exactly the parts of a layer of the common kind."""
    if {name for name, _ in layer.named_children()} != PARTS:
        return False
    own = {name for name, _ in layer.self_attn.named_children()}
    products = [
        *(getattr(layer.self_attn, name, None) for name in PRODUCTS),
        *(getattr(layer.mlp, name, None) for name in GATED - {"act_fn"}),
    ]
    norms = [
        layer.input_layernorm,
        layer.post_attention_layernorm,
        *(getattr(layer.self_attn, name) for name in own.intersection(HEAD_NORMS)),
    ]
    return (
        own in (PRODUCTS, PRODUCTS.union(HEAD_NORMS))
        and {name for name, _ in layer.mlp.named_children()} == GATED
        and all(isinstance(product, (nn.Linear, CodedLinear, PackedPart)) for product in products)
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and isinstance(getattr(layer.self_attn, "head_dim", None), int)
    )


class _Recorder:
    """Stands in for a step: records its inputs. Each token attends only to itself."""

    def __init__(self) -> None:
        self.heads: tuple[torch.Tensor, ...] = ()
        self.call: AttentionCall | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        self.heads, self.call = (query, key, value), call
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _try(module: Any, layers: list[Any]) -> None:
    """Run the module once, with both forwards of each layer; keep the lean one where they agree."""
    for layer in layers:
        layer.skim_tried = True
        pack_products(layer)
    few = for_few_tokens()
    packed = [
        one
        for one in layers
        if isinstance(one.self_attn.q_proj, PackedPart) and isinstance(one.mlp.gate_proj, PackedPart)
    ]
    trials = [_Trial(layer, few) for layer in packed]
    for trial in trials:
        trial.layer.forward = trial
    try:
        config = module.config.get_text_config()
        tokens = torch.tensor([TRIAL_TOKENS], device="cpu") % config.vocab_size
        last = int(config.max_position_embeddings) - 1
        places = torch.tensor([[0, 1, last - 1, last]], device="cpu")
        with torch.inference_mode():
            module(input_ids=tokens, position_ids=places, use_cache=False, skim_step=_Recorder())
    except Exception as error:  # a family's model code may raise anything
        trials.clear()
        log.info("layers keep transformers' forward, the trial run failed: %s", first_line(error))
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
    agreed = [trial for trial in trials if trial.agreed is not None]
    for trial in agreed:
        trial.layer.forward = trial.agreed
    for part in module.modules():
        if type(part) is nn.ModuleList and any(trial.layer in part for trial in agreed):
            part.__class__ = WholeList
    head: Any = module.get_output_embeddings()
    if agreed and getattr(type(head), "forward", None) in (nn.Linear.forward, CodedLinear.forward):
        head.forward = LeanHead(head, few)
    log.info("%d of %d layers of the common kind have a lean forward", len(agreed), len(layers))


class _Trial:
    """Stands in for a layer's forward: runs both forwards on random input, not on the model's."""

    def __init__(self, layer: Any, few: Ops) -> None:
        self.layer = layer
        self.agreed: Lean | None = None
        self._few = few

    def __call__(self, hidden: torch.Tensor, **given: Any) -> Any:
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(hidden.shape, generator=draw, dtype=hidden.dtype, device=hidden.device)
        theirs = _Recorder()
        expected = type(self.layer).forward(self.layer, hidden, **{**given, "skim_step": theirs})
        assert theirs.call is not None
        # torch first: it refuses shapes that do not match, where compiled code would read out of bounds
        if all(
            self._agrees(Lean(self.layer, theirs.call, ops), (expected, *theirs.heads), hidden, given)
            for ops in (PLAIN, self._few)
        ):
            self.agreed = Lean(self.layer, theirs.call, self._few)
        return expected

    def _agrees(
        self, lean: Lean, expected: tuple[Any, ...], hidden: torch.Tensor, given: dict[str, Any]
    ) -> bool:
        ours = _Recorder()
        try:
            return _alike((lean(hidden, **{**given, "skim_step": ours}), *ours.heads), expected)
        except Exception as error:
            log.debug("a layer is not of the common kind: %s", first_line(error))
            return False


def _alike(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return all(
        isinstance(b, torch.Tensor)
        and a.shape == b.shape
        and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )
