"""Compile decoder layers with torch.compile: operations between matrix products fuse into a few kernels.

Layers share their code and differ only in weights, so one compiled layer serves all. Attention stays an
opaque operator. The number of tokens is symbolic. One token has a separate variant, and so have few tokens:
their products use our Triton kernels, which read weights at memory bandwidth. Compiled code is cached beside
the models.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from skim import cache
from skim.attention import hook
from skim.errors import ModelError, first_line
from skim.models.forwards.packed import MergeProducts, linear, pack_products

log = logging.getLogger(__name__)

# Limit of compiled variants of a layer's code: one per model, sliding window, and one, few or many tokens.
# Beyond it torch runs layers uncompiled.
VARIANTS = 32
OPTIONS = {"pre_grad_custom_pass": MergeProducts()}
WARN_AFTER = 5.0  # seconds of compiling


def compile_layers(module: Any) -> None:
    """Compile the module's decoder layers on their first run. Calling it again changes nothing."""
    if any(hasattr(part, "skim_layer") for part in module.modules()):
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.root() / "compiled"))
    module.base_model.register_forward_pre_hook(_begin, with_kwargs=True)
    pack_products(module)
    options = _options(next(module.parameters()).device)
    for part in module.modules():
        if isinstance(getattr(part, "layer_idx", None), int):
            part.skim_layer = torch.tensor(part.layer_idx)
        if isinstance(part, GradientCheckpointingLayer):
            part.compile(dynamic=True, options=options)
    head: Any = module.get_output_embeddings()
    if getattr(type(head), "forward", None) is nn.Linear.forward:
        head.forward = FewTokensHead(head)


class FewTokensHead:
    """Forward of the output projection, which is not compiled, with our kernels for few tokens."""

    bypass = False  # True: compute as transformers does

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return (nn.functional.linear if self.bypass else linear)(hidden, self._head.weight, self._head.bias)


def _options(device: torch.device) -> dict[str, Any]:
    """Options of torch's compiler. Its kernels overlap where ours do."""
    options: dict[str, Any] = dict(OPTIONS)
    if device.type == "cuda" and hasattr(torch._inductor.config.triton, "enable_pdl"):
        from skim.attention.triton_overlap import can_overlap

        options["triton.enable_pdl"] = can_overlap(device)
    return options


def _begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    torch._dynamo.config.recompile_limit = VARIANTS  # set here because torch keeps it per thread
    hook.note_step(kwargs)


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Wrap first runs: warn once if compiling takes long, and raise a `ModelError` if it fails."""
    begun = time.perf_counter()
    warning = threading.Timer(
        WARN_AFTER,
        log.warning,
        ("compiling the layers of %s for this GPU: about half a minute, less at the next start", name),
    )
    warning.daemon = True
    warning.start()
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ModelError(
            f"{name}: its layers could not be compiled: {first_line(error)}; set enforce_eager"
        ) from error
    finally:
        warning.cancel()
    log.info("the layers of %s are ready after %.1f s", name, time.perf_counter() - begun)
