"""Block-sparse prefill on a CUDA device: the mode over the Triton kernels. Run with `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.attention.test_blocksparse import ALL, DENSE, FEW, assert_same, counted, load, prompt, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("budget", [333, 512, 8192])
def test_reading_all_blocks_is_dense(family: str, budget: int, tmp_path: Path) -> None:
    path = save(family, tmp_path)
    with load(path, device="cuda", dtype="float32", max_num_batched_tokens=budget) as llm:
        dense, visible, _, _ = counted(llm, prompt(2500), DENSE)
        assert visible == 0
        everything, visible, read, chunks = counted(llm, prompt(2500), ALL)
    assert_same(everything, dense)
    assert chunks["sparse"] > 0
    assert read == visible > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_device_reads_the_same_blocks_as_the_cpu(family: str, tmp_path: Path) -> None:
    """The same blocks, except where scores are nearly equal, and therefore nearly the same logits."""
    path = save(family, tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        with load(path, device=device, dtype="float32") as llm:
            found.append(counted(llm, prompt(3000), replace(FEW, blocksparse_alpha=0.7)))
    (cpu, visible, read, chunks), (gpu, *there) = found
    assert_same(gpu, cpu)
    assert there[0] == visible
    assert there[1] == pytest.approx(read, rel=0.01)
    assert there[2] == chunks
    assert read < visible


def test_bfloat16_stays_finite_and_shares_prefixes_only_under_its_policy(tmp_path: Path) -> None:
    with load(save("qwen3", tmp_path), device="cuda", dtype="bfloat16") as llm:
        first, visible, read, _ = counted(llm, prompt(3500), FEW)
        assert 0 < read < visible
        again, *_ = counted(llm, prompt(3500), FEW)
        dense, *_ = counted(llm, prompt(3500), DENSE)
        assert (first.metrics.cached_tokens, dense.metrics.cached_tokens) == (0, 0)
        assert again.metrics.cached_tokens > 3400
        longer, _, _, chunks = counted(llm, [*prompt(3500), *prompt(400, start=9000)], FEW)
        assert longer.metrics.cached_tokens > 3400
        assert chunks["sparse"] > 0
        assert len(longer.outputs[0].token_ids) == 8
        llm.engine.core.memory.check()
