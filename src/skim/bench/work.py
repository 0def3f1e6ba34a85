"""What a forward must do at least: multiplications for a prompt, bytes for a decode step.

These are the model's own needs, whatever the engine does in practice, so that achieved rates are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skim.memory.pool import LayerShape


@dataclass(frozen=True)
class Work:
    """A model in numbers. Expert layers count by what one token uses of them."""

    body_params: int  # of the matrices that every token goes through
    head_params: int  # of the output matrix, needed where a token is sampled
    weight_bytes: int  # all that a decode step of one row has to read
    query_heads: int
    layers: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]  # of each layer, None where all of the context is read

    def prefill_flops(self, tokens: int, cached: int = 0) -> int:
        """Floating-point operations of reading `tokens` after `cached` ones, up to the first sampled token.

        A multiplication and an addition are two: 2 for each parameter and token, and for each pair of a query
        and a key that it sees 2 for each number of the key and of the value.
        """
        matrices = 2 * self.body_params * tokens + 2 * self.head_params
        attention = 0
        for layer, window in zip(self.layers, self.windows, strict=True):
            pairs = seen_pairs(tokens, cached, window)
            attention += 2 * self.query_heads * (layer.key_dim + layer.value_dim) * pairs
        return matrices + attention

    def kv_bytes(self, context: int, itemsize: int) -> int:
        """What one row's step reads of keys and values after `context` tokens."""
        seen = (min(context, window or context) for window in self.windows)
        return sum(layer.width * tokens * itemsize for layer, tokens in zip(self.layers, seen, strict=True))

    def step_bytes(self, contexts: Sequence[int], itemsize: int) -> int:
        """What one decode step reads: the weights once, and keys and values of rows of these contexts."""
        return self.weight_bytes + sum(self.kv_bytes(context, itemsize) for context in contexts)


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
    active = _active_share(config)
    body = 0
    read = head.numel() * head.element_size()
    for parameter in module.parameters():
        if parameter is table or parameter is head:
            continue  # of the table only the tokens' own rows are read
        share = active if parameter.ndim == 3 else 1.0  # experts of a layer are stacked
        read += round(parameter.numel() * share) * parameter.element_size()
        if parameter.ndim > 1:
            body += round(parameter.numel() * share)
    return Work(
        body_params=body,
        head_params=head.numel(),
        weight_bytes=read,
        query_heads=int(config.num_attention_heads),
        layers=layers,
        windows=_windows(config, len(layers)),
    )


def _active_share(config: Any) -> float:
    used = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return used / experts if used and experts else 1.0


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
