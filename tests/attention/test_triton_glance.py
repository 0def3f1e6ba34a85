"""The kernels of fast decode rows: summaries, the choice of blocks, and attention over the chosen ones.

Runs like `test_triton.py`: compiled on a CUDA device, otherwise under Triton's interpreter.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda import glance as launches
from skim.attention.cuda import metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.captured import CapturedTables
from skim.attention.cuda.launch import Chosen
from skim.attention.glance import Evidence, Glance, estimate_logs, mass_of, ranks_of, select, shares_of
from skim.attention.glance_plain import renew_evidence, summaries
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.formats import CODED
from skim.memory.store import LayerShape
from skim.memory.summary import MEAN, VARIANCE, summary_of
from tests.attention.oracles import attend_listed
from tests.pools import make_pool, random_tokens, write_random

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
BOUNDS = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 2e-2}
"""Relative error against attention in float64 over the keys as stored."""
RANKS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative error of a block's share: products have the precision of the queries."""


class Recording(TritonBackend):
    """Keeps the blocks that were chosen last."""

    chosen: Chosen | None = None

    def _choose(self, *args: Any) -> Chosen | None:
        self.chosen = super()._choose(*args)
        return self.chosen


class Case:
    """A step over one layer with summaries; a glance for every fast row."""

    def __init__(
        self,
        rows: list[tuple[int, int, Glance | None]],  # context, queries
        *,
        kv_format: str = "auto",
        kv_heads: int = 2,
        group: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        evidence: float = 0.0,  # chance that a decode row has some
    ) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        shape = LayerShape(kv_heads, dim, value_dim or dim)
        need = [-(-(context + queries) // block_size) for context, queries, _ in rows]
        total = sum(need) + 2
        self.pool = make_pool(shape, block_size, total, total, dtype, DEVICE, kv_format, summaries=True)
        order = list(range(1, total - 1))
        rng.shuffle(order)
        self.rows: list[Row] = []
        for (context, queries, glance), count in zip(rows, need, strict=True):
            blocks, order = order[:count], order[count:]
            role = Role.DECODE if queries == 1 else Role.PREFILL
            self.rows.append(Row(role, blocks, context, queries, fast=glance))
            write_random(self.pool, blocks, context)
            if queries == 1 and rng.random() < evidence:
                shares = torch.rand(1, kv_heads, count + rng.randint(0, 9), device=DEVICE) / count
                self.rows[-1] = self.rows[-1]._replace(evidence=Evidence(shares))
        self.heads = kv_heads * group
        self.group = group
        self.use(self.rows)
        tokens = self.step.cumulative_lengths[-1]
        self.query = 2 * torch.randn(self.heads, tokens, dim, device=DEVICE).to(dtype).transpose(0, 1)
        self.key, self.value = random_tokens(self.pool, tokens)

    def use(self, rows: list[Row]) -> None:
        self.backend = Recording()
        self.step = Step(self.pool, tuple(rows), self.backend)
        self.keep_evidence()

    def keep_evidence(self) -> None:
        """Copy the evidence as it is before a step."""
        self.before = [row.evidence and row.evidence.shares.clone() for row in self.step.rows]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.step.attend(0, self.query, self.key, self.value, call)

    def check(self, call: AttentionCall) -> None:
        self.check_results(self.attend(call), call)

    def check_results(self, out: torch.Tensor, call: AttentionCall) -> None:
        """Summaries, lists, mass and attention of all rows, each given the results of those before it."""
        for index, row in enumerate(self.step.rows):
            self.check_summaries(row)
            first = self.step.cumulative_lengths[index]
            new = slice(first, first + row.queries)
            keys, values = self.pool.gather(0, self.pool.runs(row.blocks, 0, row.length))
            slots = torch.arange(row.length, device=DEVICE)
            seen = (slots[None, :] <= slots[row.context :, None]).expand(self.heads, -1, -1)
            picks = self.step.picks[index]
            mass = 1.0
            if row.evidence is not None:
                self.check_evidence(index, call)
            if picks is not None:
                lists, mass = self.check_choice(index, call)
                listed = torch.zeros(lists.shape[0], picks.blocks, dtype=torch.bool, device=DEVICE)
                listed.scatter_(1, lists, True)
                wide = listed.repeat_interleave(self.pool.block_size, 1)[:, : row.length]
                seen = seen & wide.repeat_interleave(self.group, 0)[:, None]
            expected = attend_listed(self.query[new], keys, values, call, seen)
            assert_close(out[new], expected)
            if self.step.mass is not None:
                assert abs(float(self.step.mass[index]) - mass) < 1e-2
        assert (self.step.mass is None) == all(picks is None for picks in self.step.picks)

    def check_summaries(self, row: Row) -> None:
        size = self.pool.block_size
        full = row.length // size
        if not full:
            return
        found = summaries(self.pool, 0, row.blocks[:full])
        keys = self.pool.read(0, self.pool.runs(row.blocks, 0, full * size))[0]
        for mine, twin in zip(found, summary_of(keys.unflatten(0, (full, size))), strict=True):
            close = 1e-2 if mine.dtype == torch.bfloat16 else 2e-3
            torch.testing.assert_close(mine.float(), twin, atol=close, rtol=close)

    def check_evidence(self, index: int, call: AttentionCall) -> None:
        """A slow row has renewed its evidence, like the twin; that of a fast row is as before."""
        row, before = self.step.rows[index], self.before[index]
        assert row.evidence is not None
        assert before is not None
        if self.step.picks[index] is None:
            query = self.query[self.step.cumulative_lengths[index]]
            if reading(self.pool.stores[0], call) is Reading.CODES:
                query = self.pool.stores[0].turn_query(query[None])[0]
            twin = row._replace(evidence=row.evidence._replace(shares=before.clone()))
            renew_evidence(self.pool, 0, twin, query, call)
            assert twin.evidence is not None
            before = twin.evidence.shares
        close = 10 * BOUNDS[self.query.dtype] / row.length
        torch.testing.assert_close(row.evidence.shares, before, atol=close, rtol=BOUNDS[self.query.dtype])

    def chosen_of(self, index: int) -> torch.Tensor:
        """The blocks that a row reads, as the kernel listed them. [kv_heads, reads]"""
        row, picks = self.step.rows[index], self.step.picks[index]
        assert picks is not None
        assert self.backend.chosen is not None
        tile = [i for i, other in enumerate(self.step.rows) if other.queries == 1].index(index)
        pages = self.backend.chosen.blocks[tile, :, : picks.reads].tolist()
        return torch.tensor([[row.blocks.index(page) for page in own] for own in pages], device=DEVICE)

    def check_choice(self, index: int, call: AttentionCall) -> tuple[torch.Tensor, float]:
        """A row's lists, and the mass that the twin finds in them."""
        row, picks = self.step.rows[index], self.step.picks[index]
        assert picks is not None
        lists = self.chosen_of(index)
        assert lists.shape[1] == picks.reads < picks.blocks
        assert (lists.diff(dim=1) > 0).all()
        always = [*range(picks.sinks), *range(picks.recent, picks.blocks)]
        assert all(set(always) <= set(own) for own in lists.tolist())
        query = self.query[self.step.cumulative_lengths[index]]
        turned = self.pool.stores[0].turn_query(query[None])[0]
        shares = shares_of(
            estimate_logs(turned, *summaries(self.pool, 0, row.blocks[: picks.full]), call.scale)
        )
        ranks = shares
        if row.evidence is not None:
            ranks = ranks_of(shares, row.evidence.shares[0, :, : picks.full], self.pool.block_size)
        taken = torch.zeros(len(lists), picks.blocks, dtype=torch.bool, device=DEVICE)
        taken.scatter_(1, lists, True)
        between = slice(picks.sinks, picks.recent)
        for own, kept in zip(ranks[:, between], taken[:, between], strict=True):
            if kept.any() and not kept.all():
                assert own[kept].min() >= own[~kept].max() * (1 - RANKS[query.dtype])
        return lists, float(mass_of(shares, lists, picks))


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    bound = BOUNDS[out.dtype]
    error = (out.double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    assert error.norm() <= bound * size.norm()
    assert (error <= 4 * bound * size.clamp_min(1e-2 * size.max())).all()


def copied(evidence: Evidence | None) -> Evidence | None:
    return evidence and evidence._replace(shares=evidence.shares.clone())


def random_row(rng: random.Random, longest: int) -> tuple[int, int, Glance | None]:
    queries = rng.choice([1, 1, 1, rng.randint(2, 40)])
    glance = Glance(rng.randint(1, longest), rng.choice([1, rng.randint(1, longest // 3)]))
    return rng.randint(0, longest), queries, glance if queries == 1 and rng.random() < 0.8 else None


@pytest.mark.parametrize("kv_format", ["auto", *CODED])
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 40))
def test_a_random_step(seed: int, kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{seed} {kv_format}")
    if INTERPRETED:  # it has one processor and would not split rows
        count = rng.choice([1, 132])
        monkeypatch.setattr(metadata, "processors", lambda _: count)
    if rng.random() < 0.3:
        monkeypatch.setattr(launches, "HELD", 1)  # shares are computed in pieces
    longest = 300 if INTERPRETED else 9000
    dim = rng.choice([16, 64, 96, 128] if INTERPRETED else [16, 64, 96, 128, 256])
    case = Case(
        [random_row(rng, longest) for _ in range(rng.randint(1, 3 if INTERPRETED else 5))],
        kv_format=kv_format,
        kv_heads=rng.choice([1, 2, 3]),
        group=rng.choice([1, 2, 3, 4, 7, 16]),
        dim=dim,
        value_dim=rng.choice([dim, dim, 64]),
        block_size=rng.choice([4, 16, 32, 64] if INTERPRETED else [1, 4, 16, 64, 128]),
        dtype=rng.choice([torch.float32, HALF]),
        seed=seed,
        evidence=0.6,
    )
    sinks = torch.randn(case.heads, device=DEVICE) if rng.random() < 0.3 else None
    case.check(AttentionCall(dim**-0.5, softcap=rng.choice([None, None, 3.0]), sinks=sinks))


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_the_results_of_the_torch_backend(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 no two shares are near: both backends choose the same blocks."""
    rows = [(300, 1, Glance(100, 40)), (77, 1, None), (191, 1, Glance(64, 1)), (30, 40, None)]
    case = Case(rows, kv_format=kv_format, dim=128, group=4, evidence=1.0)
    call = AttentionCall(128**-0.5)
    own = [row._replace(evidence=copied(row.evidence)) for row in case.step.rows]
    out = case.attend(call)
    monkeypatch.setattr(case.pool.stores[0], "write", lambda *_: None)  # it might round a code the other way
    twin = Step(case.pool, tuple(own), TorchBackend())
    expected = twin.attend(0, case.query, case.key, case.value, call)
    assert_close(out, expected.double())
    assert case.step.mass is not None
    assert twin.mass is not None
    torch.testing.assert_close(case.step.mass, twin.mass, atol=1e-4, rtol=1e-4)
    for row, other in zip(case.step.rows, own, strict=True):
        if row.evidence is not None and other.evidence is not None:
            torch.testing.assert_close(row.evidence.shares, other.evidence.shares, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kv_format", ["auto", "int4"])
def test_a_budget_of_the_whole_row_is_dense(kv_format: str) -> None:
    call = AttentionCall(0.125)
    slow = Case([(255, 1, None), (120, 1, None)], kv_format=kv_format, dtype=HALF)
    expected = slow.attend(call)
    fast = Case([(255, 1, Glance(256, 16)), (120, 1, Glance(1000, 16))], kv_format=kv_format, dtype=HALF)
    assert torch.equal(fast.attend(call), expected)
    assert fast.step.mass is None
    mixed = Case([(255, 1, Glance(256, 16)), (120, 1, Glance(32, 16))], kv_format=kv_format, dtype=HALF)
    assert_close(mixed.attend(call)[:1], expected[:1].double())
    assert mixed.step.mass is not None
    assert float(mixed.step.mass[0]) == 1.0
    assert float(mixed.step.mass[1]) < 0.99


@pytest.mark.parametrize("seed", range(6 if INTERPRETED else 40))
def test_of_equal_shares_the_first_are_chosen(seed: int) -> None:
    """Few distinct keys, so that many blocks are equal: the lists are exactly those of the twin."""
    rng = random.Random(seed)
    blocks, size, kinds = rng.randint(9, 40 if INTERPRETED else 3000), 4, rng.randint(1, 4)
    glance = Glance(rng.randint(1, blocks - 6) * size, rng.randint(1, size))
    case = Case([(blocks * size - rng.randint(2, 4), 1, glance)], group=1, dim=16, block_size=size, seed=seed)
    [picks] = case.step.picks
    assert picks is not None
    [row] = case.rows
    distinct = 3 * torch.randn(kinds, 2, 16, device=DEVICE)
    kind = torch.randint(kinds, (picks.full,), device=DEVICE)
    keys = distinct[kind].repeat_interleave(size, 0)
    case.pool.write(0, case.pool.runs(row.blocks, 0, len(keys)), keys, torch.randn_like(keys))
    case.attend(AttentionCall(1.0))
    logs = torch.einsum("hd,khd->hk", case.query[0], distinct)
    assert torch.equal(case.chosen_of(0), select(logs[:, kind], picks))


@pytest.mark.parametrize("name", [MEAN, VARIANCE])
def test_a_broken_block_is_read_and_shows(name: str) -> None:
    """A head with a NaN among its keys reads it, as a slow row does. Other heads and rows do not notice."""
    case = Case([(400, 1, Glance(64, 16)), (400, 1, Glance(64, 16))])
    planes, block = case.pool.planes(0).blocks, case.rows[0].blocks[9]
    planes["key"][block, 3, 1, 5] = float("nan")
    for number in (float("inf"), float("nan")):
        planes[name][block, 1, 5] = number
        out = case.attend(AttentionCall(0.125))
        assert 9 in case.chosen_of(0)[1]
        assert not out[0, 2:].isfinite().any()
        assert out[0, :2].isfinite().all()
        assert out[1].isfinite().all()
        assert case.step.mass is not None
        assert case.step.mass.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_captured_tables_serve_other_rows_and_budgets(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for fast and slow rows of any length and budget. Padding is neither written nor read."""
    monkeypatch.setattr(metadata, "processors", lambda _: 132)
    rows = [(299, 1, Glance(100, 40)), (150, 1, None), (30, 1, Glance(16, 1))]
    case = Case(rows, kv_format=kv_format, dtype=HALF, group=4, evidence=1.0)
    call = AttentionCall(0.125)
    captured = CapturedTables(case.pool, rows=4, slots=310)
    key = (4, (512, 512))
    query, new_key, value = (torch.cat([t, t[:1] * 3]) for t in (case.query, case.key, case.value))
    captured_step: Step | None = None
    for rows_now in (
        case.rows,
        [row._replace(context=row.context + 1) for row in case.rows[:2]],
        [
            case.rows[0]._replace(context=191, fast=None),
            case.rows[1]._replace(context=143, fast=Glance(64, 20)),
            case.rows[2]._replace(fast=Glance(1000)),
        ],
    ):
        step = Step(case.pool, tuple(rows_now), case.backend)
        assert captured.refill(step)[1] == key[1]
        if captured_step is None:
            captured_step = step
            step.metadata = captured.metadata(step, key)
            if not INTERPRETED:
                step.attend(0, query, new_key, value, call)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = step.attend(0, query, new_key, value, call)
        case.step = Step(case.pool, tuple(rows_now), case.backend)
        case.keep_evidence()
        if INTERPRETED:
            out = captured_step.attend(0, query, new_key, value, call)
        else:
            graph.replay()
        mass = captured_step.mass
        assert mass is not None
        assert mass.shape == (4,)
        case.step.mass = mass
        case.query = query[: len(rows_now)]
        case.check_results(out[: len(rows_now)], call)


def test_a_step_without_fast_rows_writes_summaries() -> None:
    case = Case([(0, 100, None), (15, 1, None), (40, 9, None), (31, 1, None)], kv_format="k8v4")
    assert case.step.metadata.fast is None
    case.check(AttentionCall(0.125))
    assert case.step.mass is None
