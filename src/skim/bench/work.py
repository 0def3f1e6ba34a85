"""Minimum work of a forward: operations for a prompt, bytes for a decode step.

These follow from the model alone, not from the engine, so that achieved rates are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skim.memory.store import LayerShape, LayerStore
from skim.models.quantized.module import Coded


@dataclass(frozen=True)
class Work:
    """A model's size. Expert layers count by the experts that one token uses."""

    body_params: int  # of the matrices that every token passes through
    head_params: int  # of the output matrix, applied only where a token is sampled
    weight_bytes: int  # read by a decode step of one row
    query_heads: int
    layers: tuple[LayerShape, ...]
    experts: int = 0  # experts in an expert layer; 0 without expert layers
    active: int = 0  # experts that one token uses
    expert_bytes: int = 0  # bytes of one expert, summed over all layers

    def prefill_flops(self, tokens: int, cached: int = 0) -> int:
        """FLOPs of reading `tokens` after `cached` ones, up to the first sampled token.

        A multiply-add counts as 2 FLOPs: one multiply-add for each parameter and token, and one for each
        element of the key and the value of every query-key pair.
        """
        matrices = 2 * self.body_params * tokens + 2 * self.head_params
        attention = 0
        for layer in self.layers:
            pairs = seen_pairs(tokens, cached, layer.window)
            attention += 2 * self.query_heads * (layer.key_dim + layer.value_dim) * pairs
        return matrices + attention

    def weights_read(self, rows: int) -> int:
        """Bytes of weights that a decode step reads if all rows choose different experts.

        Rows that choose the same experts read less, so with experts and more than one row this is not a
        strict lower bound.
        """
        more = min(self.experts, rows * self.active) - min(self.experts, self.active)
        return self.weight_bytes + more * self.expert_bytes

    def step_bytes(self, contexts: Sequence[int], stores: Sequence[LayerStore], block_size: int) -> int:
        """Bytes that one decode step reads: the weights once, and the keys and values of every row."""
        return self.weights_read(len(contexts)) + sum(kv_bytes(stores, one, block_size) for one in contexts)


def kv_bytes(stores: Sequence[LayerStore], context: int, block_size: int) -> int:
    """Bytes of keys and values that one row's decode step reads after `context` tokens."""
    return sum(store.read_bytes(min(context, store.shape.window or context), block_size) for store in stores)


def seen_pairs(tokens: int, cached: int = 0, window: int | None = None) -> int:
    """Query-key pairs under a causal mask: query i sees keys 0 to i, or the last `window` of them."""
    first, end = cached + 1, cached + tokens + 1  # queries see first, first + 1, ..., end - 1 keys
    full = min(end, max(first, window or end))  # from `full` keys, the sliding window applies
    grows = (first + full - 1) * (full - first) // 2
    return grows + (end - full) * (window or 0)


def work_of(module: Any, layers: tuple[LayerShape, ...]) -> Work:
    """The work of a transformers module."""
    config = module.config.get_text_config()
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    experts, active = _experts(config)
    body = expert_params = expert_bytes = 0  # of all experts together
    head_params, read = _size(head)
    for part in module.modules():
        if isinstance(part, Coded) and part is not table and part is not head:
            body, read = body + part.values, read + part.coded.nbytes
    ends = {id(one) for end in (table, head) for one in end.parameters(recurse=False) if one.ndim > 1}
    for name, parameter in module.named_parameters():
        if id(parameter) in ends:
            continue  # a step reads only its tokens' rows of the embedding table
        matrix = parameter.ndim > (2 if is_stacked(name) else 1)  # experts' biases are stacked too
        if experts and is_expert(name):
            expert_bytes += parameter.numel() * parameter.element_size()
            expert_params += parameter.numel() * matrix
        else:
            read += parameter.numel() * parameter.element_size()
            body += parameter.numel() * matrix
    return Work(
        body_params=body + (expert_params * active // experts if experts else 0),
        head_params=head_params,
        weight_bytes=read + (expert_bytes * active // experts if experts else 0),
        query_heads=int(config.num_attention_heads),
        layers=layers,
        experts=experts,
        active=active,
        expert_bytes=expert_bytes // experts if experts else 0,
    )


def _size(linear: Any) -> tuple[int, int]:
    """Values and bytes of a matrix."""
    if isinstance(linear, Coded):
        return linear.values, linear.coded.nbytes
    return linear.weight.numel(), linear.weight.nbytes


def is_expert(name: str) -> bool:
    """True for parameters of routed experts, False for shared experts and all others."""
    return "experts" in name.split(".")[:-1]


def is_stacked(name: str) -> bool:
    """True if a layer's experts are one parameter with an extra dimension, not a module each."""
    parts = name.split(".")
    return is_expert(name) and not parts[parts.index("experts") + 1].isdigit()


def _experts(config: Any) -> tuple[int, int]:
    """Experts of a layer and experts per token; (0, 0) if the config has none."""
    spellings = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(found) for name in spellings if (found := getattr(config, name, None))), 0)
    active = int(getattr(config, "num_experts_per_tok", None) or 0)
    return (experts, active) if experts and active else (0, 0)
