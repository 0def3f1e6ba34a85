"""Attention on the CPU over block tables whose blocks ended behind sliding windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from skim.attention.backend import Backend
from skim.attention.cpu.native import make_native
from skim.attention.cpu.torch_backend import TorchBackend
from skim.memory.pool import KVPool
from tests.attention.ended import check_random_steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [lambda _: TorchBackend(), make_native], ids=["torch", "native"])
def test_steps_read_no_block_that_has_ended(make: Callable[[KVPool], Backend], seed: int) -> None:
    check_random_steps(make, torch.device("cpu"), seed, steps=20, in_one_slab=False)
