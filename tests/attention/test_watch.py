"""Evidence of the end of a prompt: what its last queries attend to, however the prompt is cut into chunks."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from skim.attention import watch as watching
from skim.attention.cpu.native import make_native
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda.captured import refuses_capture
from skim.attention.glance import Evidence
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.attention.watch import Watch, highest_shares
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from tests.pools import CPU


def brute_force(
    query: torch.Tensor, first: int, key: torch.Tensor, block_size: int, call: AttentionCall
) -> torch.Tensor:
    """One query head, query and slot at a time."""
    (queries, heads, _), (slots, kv_heads, _) = query.shape, key.shape
    group = heads // kv_heads
    best = torch.zeros(kv_heads, -(-slots // block_size), dtype=torch.float64)
    for at in range(queries):
        for head in range(kv_heads):
            shares = torch.zeros(best.shape[1], dtype=torch.float64)
            for member in range(head * group, (head + 1) * group):
                scores = key[: first + at + 1, head].double() @ query[at, member].double() * call.scale
                if call.softcap is not None:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                for slot, weight in enumerate(torch.softmax(scores, 0)):
                    shares[slot // block_size] += weight / group
            best[head] = torch.maximum(best[head], shares)
    return best.float()


@pytest.mark.parametrize("most", [1, 500, watching.MOST_SCORES])
@pytest.mark.parametrize("seed", range(8))
def test_the_highest_share_of_any_query(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_SCORES", most)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    queries, kv_heads, group, dim = rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 4), 8
    slots = queries + rng.randint(0, 60)
    query, key = 2 * torch.randn(queries, kv_heads * group, dim), torch.randn(slots, kv_heads, dim)
    call = AttentionCall(0.5, softcap=rng.choice([None, 3.0]))
    block_size = rng.choice([1, 3, 16, 64])
    found = highest_shares(query, slots - queries, key, block_size, call.scale, call.softcap)
    wanted = brute_force(query, slots - queries, key, block_size, call)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def evidence_of(cuts: list[int], prompt: int, watched: int, kv_format: str, native: bool) -> Evidence:
    """The evidence of a prompt that is computed in chunks; tokens after the prompt are generated ones."""
    torch.manual_seed(0)
    shape, heads, size = LayerShape(2, 32, 32), 6, 16
    count = -(-cuts[-1] // size)
    pool = KVPool.of_blocks(
        [shape],
        2 * count,
        block_size=size,
        dtype=torch.float32,
        device=CPU,
        slab_blocks=count // 2 + 1,
        kv_format=kv_format,
        summaries=True,
    )
    table = pool.allocate(2 * count)[::-2]
    query, key, value = (torch.randn(cuts[-1], n, 32) for n in (heads, 2, 2))
    backend = make_native(pool) if native else TorchBackend()
    evidence = Evidence.of(pool, cuts[-1] + 5)
    watch = Watch(range(prompt - watched, prompt), evidence)
    for start, end in pairwise(cuts):
        row = Row(Role.PREFILL, table, start, end - start, watch=watch)
        step = Step(pool, (row,), backend)
        step.attend(0, query[start:end], key[start:end], value[start:end], AttentionCall(0.3))
    return evidence


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
@pytest.mark.parametrize("native", [False, True])
def test_evidence_does_not_depend_on_where_chunks_are_cut(native: bool, kv_format: str) -> None:
    for prompt, end in ((200, 200), (215, 215), (208, 230)):
        whole = evidence_of([0, end], prompt, 32, kv_format, native)
        assert whole.shares[0, :, : prompt // 16].gt(0).all()
        assert not whole.shares[0, :, prompt // 16 :].any()
        rng = random.Random(prompt)
        for _ in range(3):
            cuts = sorted({0, end, *(rng.randrange(1, end) for _ in range(2)), end - rng.randrange(1, 40)})
            cuts += [end - 1] if end - 1 not in cuts else []  # a chunk of one token
            found = evidence_of(sorted(cuts), prompt, 32, kv_format, native)
            torch.testing.assert_close(found.shares, whole.shares, atol=1e-5, rtol=1e-3)


def test_evidence_is_that_of_the_watched_queries() -> None:
    torch.manual_seed(0)
    query, key, _ = (torch.randn(100, n, 32) for n in (6, 2, 2))
    found = evidence_of([0, 100], 100, 32, "auto", native=False).shares[0]
    wanted = brute_force(query[68:], 68, key, 16, AttentionCall(0.3))
    torch.testing.assert_close(found[:, :6], wanted[:, :6], atol=1e-5, rtol=1e-4)


def test_chunks_that_are_watched_are_not_captured() -> None:
    pool = KVPool.of_blocks(
        [LayerShape(1, 8, 8)], 2, block_size=16, dtype=torch.float32, device=CPU, summaries=True
    )
    row = Row(Role.PREFILL, pool.allocate(2), 0, 20)
    assert refuses_capture(Step(pool, (row,), TorchBackend())) is None
    row = row._replace(watch=Watch(range(10, 20), Evidence.of(pool, 20)))
    assert refuses_capture(Step(pool, (row,), TorchBackend())) == "watch"
