"""Identity of a model: a hash of its config and weights, so that keys and values of another are not used."""

from __future__ import annotations

import hashlib
import json

import torch

from skim.models.load import LoadedModel
from skim.models.sizes import place_of

DIGITS = 24
_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation")
SAMPLED = 4096  # words of a tensor whose places count too


def fingerprint(model: LoadedModel) -> str:
    """The same for the same config and weights in the same dtype. Reads all weights once."""
    found = hashlib.sha256()
    config = getattr(model.module, "config", None)
    settings = json.loads(config.to_json_string(use_diff=False)) if config is not None else {}
    for name in _VOLATILE:
        settings.pop(name, None)
    found.update(json.dumps([settings, str(model.dtype), model.vocab_size], sort_keys=True).encode())
    sums: list[torch.Tensor] = []
    seen: set[tuple[int, int]] = set()  # tied weights are read once
    for name, tensor in sorted(_tensors(model).items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if (place := place_of(tensor)) not in seen:
            seen.add(place)
            if model.host_layers is not None:
                model.host_layers.bring(tensor)
            sums.extend(_checksums(tensor))
    if model.host_layers is not None:
        model.host_layers.rest()
    if sums:
        found.update(torch.stack(sums).cpu().numpy().tobytes())
    return found.hexdigest()[:DIGITS]


def _tensors(model: LoadedModel) -> dict[str, torch.Tensor]:
    state = getattr(model.module, "state_dict", None)
    return dict(state()) if state is not None else {}


def _checksums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sums over all bits of a tensor, and over some with weights by place. Wrapping around is harmless."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = len(flat) - len(flat) % 8
    words, rest = flat[:whole].view(torch.int64), flat[whole:].long()
    some = words[:: max(1, len(words) // SAMPLED)]
    weights = torch.arange(1, len(some) + 1, device=flat.device)
    return [words.sum(), (some * weights).sum(), rest.sum()]
