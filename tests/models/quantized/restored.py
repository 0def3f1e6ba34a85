"""A plain transformers model with a checkpoint's restored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from skim.models.quantized.checkpoint import Checkpoint


def restored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All weights as float32."""
    return {
        name: checkpoint.coded(name).restore()
        if checkpoint.is_coded(name)
        else checkpoint.plain(name).float()
        for name in checkpoint.names()
    }


def restored_model(directory: Path) -> Any:
    """The directory's model in float32."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict(restored(Checkpoint(directory, "restored")), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()
