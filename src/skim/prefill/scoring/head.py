"""Logits of a model's output head, for hidden states that a scorer has computed."""

from __future__ import annotations

from typing import Any

import torch


def logits_of(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of these last hidden states, as the model scales and caps them. [..., vocabulary] float32"""
    config = module.config.get_text_config()
    logits: torch.Tensor = module.get_output_embeddings()(hidden.to(module.dtype)).float()
    logits *= getattr(config, "logit_scale", None) or 1.0  # Cohere
    logits /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits
