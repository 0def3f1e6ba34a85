"""What a forward must do at least: multiplications for a prompt, bytes for a decode step.

These are the model's own needs, whatever the engine does in practice, so that achieved rates are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skim.memory.store import LayerShape, LayerStore


@dataclass(frozen=True)
class Work:
    """A model in numbers. Expert layers count by what one token uses of them."""

    body_params: int  # of the matrices that every token goes through
    head_params: int  # of the output matrix, needed where a token is sampled
    weight_bytes: int  # all that a decode step of one row has to read
    query_heads: int
    layers: tuple[LayerShape, ...]
    experts: int = 0  # of a layer that has some,
    active: int = 0  # those that a token uses,
    expert_bytes: int = 0  # and what one of them has, in all such layers together

    def prefill_flops(self, tokens: int, cached: int = 0) -> int:
        """Floating-point operations of reading `tokens` after `cached` ones, up to the first sampled token.

        A multiplication and an addition are two: 2 for each parameter and token, and for each pair of a query
        and a key that it sees 2 for each number of the key and of the value.
        """
        matrices = 2 * self.body_params * tokens + 2 * self.head_params
        attention = 0
        for layer in self.layers:
            pairs = seen_pairs(tokens, cached, layer.window)
            attention += 2 * self.query_heads * (layer.key_dim + layer.value_dim) * pairs
        return matrices + attention

    def weights_read(self, rows: int) -> int:
        """What a step of so many rows reads of the weights, where they all choose different experts.

        Rows that choose alike read less, so with experts and more than one row this is no strict bound: it
        is what rows that have nothing in common need, as far as there are experts.
        """
        more = min(self.experts, rows * self.active) - min(self.experts, self.active)
        return self.weight_bytes + more * self.expert_bytes

    def step_bytes(self, contexts: Sequence[int], stores: Sequence[LayerStore]) -> int:
        """What one decode step reads: the weights once, and keys and values of rows of these contexts."""
        return self.weights_read(len(contexts)) + sum(kv_bytes(stores, one) for one in contexts)


def kv_bytes(stores: Sequence[LayerStore], context: int) -> int:
    """What one row's step reads of keys and values after `context` tokens."""
    return sum(store.bytes(min(context, store.shape.window or context)) for store in stores)


def seen_pairs(tokens: int, cached: int = 0, window: int | None = None) -> int:
    """Pairs of a query and a key under a causal mask: query i sees the keys 0 to i, or the last `window`."""
    first, end = cached + 1, cached + tokens + 1  # keys that the queries see: first, first + 1, ..., end - 1
    full = min(end, max(first, window or end))  # from here on the window cuts
    grows = (first + full - 1) * (full - first) // 2
    return grows + (end - full) * (window or 0)


def work_of(module: Any, layers: tuple[LayerShape, ...]) -> Work:
    """The numbers of a transformers module."""
    config = module.config.get_text_config()
    table = module.get_input_embeddings().weight
    head = module.get_output_embeddings().weight
    experts, active = _experts(config)
    body = expert_params = expert_bytes = 0  # of all experts together
    read = head.numel() * head.element_size()
    for name, parameter in module.named_parameters():
        if parameter is table or parameter is head:
            continue  # of the table only the tokens' own rows are read
        matrix = parameter.ndim > (2 if is_stacked(name) else 1)  # biases of experts are stacked as well
        if experts and is_expert(name):
            expert_bytes += parameter.numel() * parameter.element_size()
            expert_params += parameter.numel() * matrix
        else:
            read += parameter.numel() * parameter.element_size()
            body += parameter.numel() * matrix
    return Work(
        body_params=body + (expert_params * active // experts if experts else 0),
        head_params=head.numel(),
        weight_bytes=read + (expert_bytes * active // experts if experts else 0),
        query_heads=int(config.num_attention_heads),
        layers=layers,
        experts=experts,
        active=active,
        expert_bytes=expert_bytes // experts if experts else 0,
    )


def is_expert(name: str) -> bool:
    """Whether a parameter is of the experts that tokens choose; those that all tokens share are not."""
    return "experts" in name.split(".")[:-1]


def is_stacked(name: str) -> bool:
    """Whether the experts of a layer are one parameter, with a dimension more, and not a module each."""
    parts = name.split(".")
    return is_expert(name) and not parts[parts.index("experts") + 1].isdigit()


def _experts(config: Any) -> tuple[int, int]:
    """Experts of a layer, and those that a token uses; none where a config speaks of none."""
    spellings = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(found) for name in spellings if (found := getattr(config, name, None))), 0)
    active = int(getattr(config, "num_experts_per_tok", None) or 0)
    return (experts, active) if experts and active else (0, 0)
