"""Embeddings of texts: the mean of the model's last hidden states, normalised.

The served model was trained to generate, not to embed, and its vectors are no better than that. A text is
read in chunks through a temporary KV pool, one text at a time. Nothing of it remains, and decode rows run
between chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch

from skim.attention.backend import choose_backend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.device import arrays_to_device, to_host, until_computed
from skim.errors import EngineError
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from skim.prefill.scoring.scorer import SLICE_SECONDS
from skim.prefill.scoring.windows import run, tokens_per_slice

CHUNK = 256  # tokens in one forward on a CPU
BLOCK = 16


class _ChunkStep:
    """Stands in for a step: the chunk's tokens, and attention over the temporary pool."""

    def __init__(self, step: Step, ids: torch.Tensor) -> None:
        [row] = step.rows
        self.input_ids = ids[None, row.context : row.length]
        self.position_ids = torch.arange(row.context, row.length, device=ids.device)[None]
        self._step = step

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        return self._step.attend(layer, query, key, value, call)


def embed(
    module: Any,
    layers: Sequence[LayerShape],
    texts: Sequence[tuple[int, ...]],  # token ids, none empty
    *,
    chunk: int | None = None,
    seconds: float = SLICE_SECONDS,
    hand_over: Callable[[], None] = lambda: None,
) -> Generator[None, None, list[np.ndarray]]:
    """A unit vector [hidden] for each text, in slices of about `seconds` on a GPU. Raises EngineError."""
    if chunk is None:
        chunk = CHUNK
        if module.device.type == "cuda":
            chunk = max(CHUNK, tokens_per_slice(module, len(layers), seconds))
    found = []
    for text in texts:
        try:
            total = yield from _sum(module, layers, text, chunk, hand_over)
        except Exception as error:
            raise EngineError(f"a text of {len(text)} tokens could not be embedded: {error}") from error
        found.append(normalised(total / len(text)))
    return found


def normalised(vector: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector)
    if not np.isfinite(length) or length == 0:
        raise EngineError("the model's hidden states are not finite, or zero (NaN or infinity)")
    scaled: np.ndarray = vector / length
    return scaled


def _sum(
    module: Any,
    layers: Sequence[LayerShape],
    text: tuple[int, ...],
    chunk: int,
    hand_over: Callable[[], None],
) -> Generator[None, None, np.ndarray]:
    """The sum of the last hidden states, in float32."""
    blocks = -(-len(text) // BLOCK)
    dtype = next(module.parameters()).dtype
    pool = KVPool.of_blocks(layers, blocks, block_size=BLOCK, dtype=dtype, device=module.device)
    table, backend = pool.allocate(blocks), choose_backend(pool, decodes=False)
    [ids] = arrays_to_device([np.array(text, dtype=np.int64)], module.device)
    total: torch.Tensor | None = None
    for start in range(0, len(text), chunk):
        row = Row(Role.PREFILL, table, start, min(chunk, len(text) - start), prompt=len(text))
        output = run(module.base_model, _ChunkStep(Step(pool, (row,), backend), ids))
        part = output.last_hidden_state[0].float().sum(dim=0)
        total = part if total is None else total + part
        hand_over()
        yield
    assert total is not None
    [held] = to_host([total])
    yield from until_computed(module.device)
    return held.numpy().astype(np.float64)  # type: ignore[no-any-return]
