"""The output head of a model, run on given hidden states by the family's own code.

A family may scale or cap its logits after the output projection. So the head is the model itself with another
body, one that returns the hidden states it is given. Logits of many tokens can then be computed in pieces,
and no tensor of tokens x vocabulary exists.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def has_head(module: Any) -> bool:
    """True if the module separates its body from its head."""
    return getattr(module, "base_model", module) is not module


class _Given(nn.Module):
    """Stands in for the body: returns `inputs_embeds` as its last hidden state."""

    kind: Any  # class of the body's output

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self.kind(last_hidden_state=inputs_embeds)


class Head:
    """The head of a transformers module. It shares the module's weights, and their faster forwards."""

    def __init__(self, module: Any) -> None:
        self._body = module.base_model
        self.vocab_size = int(module.config.get_text_config().vocab_size)
        self._given = _Given()
        self._module = copy.copy(module)
        self._module._modules = {
            name: self._given if part is self._body else part for name, part in module._modules.items()
        }

    @contextmanager
    def seeing_hidden(self) -> Iterator[list[torch.Tensor]]:
        """Collect the last hidden states [tokens, width] of forwards of the whole module."""
        seen: list[torch.Tensor] = []

        def note(_: Any, __: Any, output: Any) -> None:
            self._given.kind = type(output)
            seen.append(output.last_hidden_state[0])

        handle = self._body.register_forward_hook(note)
        try:
            yield seen
        finally:
            handle.remove()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] hidden states, of a forward that was seen -> [tokens, vocab]"""
        output = self._module(inputs_embeds=hidden[None], use_cache=False, logits_to_keep=0)
        return output.logits[0]  # type: ignore[no-any-return]
