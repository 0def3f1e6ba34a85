"""The Triton backend over block tables whose blocks ended behind sliding windows; see `test_triton.py`."""

# ruff: noqa: E402

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from skim.attention.cuda.backend import TritonBackend
from skim.attention.step import Step
from tests.attention.ended import World, check_random_steps

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("seed", range(3))
def test_steps_read_no_block_that_has_ended(seed: int) -> None:
    check_random_steps(lambda _: TritonBackend(), DEVICE, seed, 4 if INTERPRETED else 20, in_one_slab=True)


def test_captured_tables_hold_the_longest_rows() -> None:
    """Decode steps over buffers that stay in place, as CUDA graphs use them."""
    backend = TritonBackend()
    world = World(7, DEVICE)
    for _ in range(3):
        world.add(False)
    world.step([90, 35, 3], lambda _: backend)
    buffers = backend.graph_buffers(world.ends.pool, 4, 256, 1)

    class Captured:
        """The backend with metadata over the buffers."""

        counter = backend.counter

        def prepare(self, step: Step) -> object:
            return buffers.metadata(step, buffers.refill(step))

        def attend(self, step: Step, layer: int, *others: object) -> torch.Tensor:
            padded = [
                torch.cat([t, t.new_zeros(1, *t.shape[1:])]) if isinstance(t, torch.Tensor) else t
                for t in others
            ]
            return backend.attend(step, layer, *padded)[: len(step.rows)]  # type: ignore[arg-type]

    for _ in range(6 if INTERPRETED else 30):
        world.step([1, 1, 1], lambda _: Captured())  # type: ignore[arg-type, return-value]
    assert all(any(ends.starts) for ends, _, _ in world.sequences[:2])
