"""Decoder layers through torch.compile: what stands between the matrix products becomes a few kernels.

One layer is compiled and serves for all: they share their code, and differ in weights alone. Attention stays
an operator that the compiler does not look into. The number of tokens is symbolic; one token is a case of its
own, in which products are a kernel of ours that reads weights at the memory's speed. What was compiled is
kept beside the models.
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
from transformers.modeling_layers import GradientCheckpointingLayer

from skim import cache
from skim.attention import hook
from skim.errors import ModelError
from skim.models.forwards.packed import MergeProducts, pack_products
from skim.models.probe import first_line

log = logging.getLogger(__name__)

# Of one layer's code: models, windows, one token or many. Beyond it torch runs layers as they are.
VARIANTS = 32
OPTIONS = {"pre_grad_custom_pass": MergeProducts()}
PATIENCE = 5.0  # seconds after which somebody who waits is told what for


def compile_layers(module: Any) -> None:
    """Have the module's decoder layers compiled when they are first run. Calling it again changes nothing."""
    if any(hasattr(part, "skim_layer") for part in module.modules()):
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.root() / "compiled"))
    module.base_model.register_forward_pre_hook(_begin, with_kwargs=True)
    pack_products(module)
    for part in module.modules():
        if isinstance(getattr(part, "layer_idx", None), int):
            part.skim_layer = torch.tensor(part.layer_idx)
        if isinstance(part, GradientCheckpointingLayer):
            part.compile(dynamic=True, options=dict(OPTIONS))


def _begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    torch._dynamo.config.recompile_limit = VARIANTS  # here, since torch keeps such settings for each thread
    hook.note_step(kwargs)


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Around first runs: whoever waits for long is told why, once."""
    begun = time.perf_counter()
    told = threading.Timer(
        PATIENCE,
        log.warning,
        ("compiling the layers of %s for this GPU: half a minute or so, less at the next start", name),
    )
    told.daemon = True
    told.start()
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ModelError(
            f"{name}: its layers could not be compiled: {first_line(error)}; use enforce_eager"
        ) from error
    finally:
        told.cancel()
    log.info("the layers of %s are ready after %.1f s", name, time.perf_counter() - begun)
