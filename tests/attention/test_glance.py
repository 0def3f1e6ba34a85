"""Fast decode rows: the blocks they choose, and what every backend makes of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from skim.attention.backend import Backend
from skim.attention.cpu.native import make_native
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.glance import (
    SINKS,
    SPREAD,
    Evidence,
    Glance,
    Picks,
    estimate_logs,
    mass_of,
    picks_of,
    select,
    shares_of,
)
from skim.attention.glance_plain import summaries
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from skim.memory.summary import summary_of
from tests.pools import CPU

FORMATS = ("auto", "int8", "k8v4", "int4")
SHAPE = LayerShape(2, 32, 32)
HEADS = 6
CALL = AttentionCall(0.3)


def check_selection(
    selected: torch.Tensor, picks: Picks, glance: Glance, length: int, block_size: int
) -> None:
    """A selection has no repeats, stays in bounds, and has the sinks and the recent slots."""
    for chosen in selected.tolist():
        assert chosen == sorted(set(chosen))
        assert len(chosen) == picks.reads <= picks.blocks
        assert chosen[0] >= 0
        assert chosen[-1] == picks.blocks - 1
        slots = {slot for block in chosen for slot in range(block * block_size, (block + 1) * block_size)}
        assert slots >= set(range(min(SINKS, length)))
        assert slots >= set(range(max(0, length - glance.recent), length))
        most = max(glance.budget, glance.recent + SINKS + 2 * block_size) + block_size
        assert len(chosen) * block_size < most + block_size


def test_a_selection_has_sinks_and_recent_and_nothing_twice_for_any_sizes() -> None:
    generator = random.Random(0)
    fewer = compared = 0
    for _ in range(1000):
        block_size = generator.choice([1, 2, 3, 5, 16, 64, 128])
        length = generator.randrange(1, generator.choice([20, 300, 3000]))
        budget, recent = (
            generator.randrange(1, generator.choice([length // 3, 2 * length]) + 2) for _ in "br"
        )
        glance = Glance(budget, recent, generator.choice([1, 1.5, 2, 100]))
        picks = picks_of(glance, length, block_size)
        assert picks.best >= 0
        assert picks.best <= picks.recent - picks.sinks
        if picks.compares:
            compared += 1
            assert 0 <= picks.sure < picks.best < picks.sure + picks.compares <= picks.recent - picks.sinks
            assert picks.sure + picks.compares <= glance.candidates * picks.best
        else:
            assert picks.sure == 0
            assert (
                picks.best == picks.recent - picks.sinks or int(glance.candidates * picks.best) <= picks.best
            )
        assert picks.full == length // block_size
        assert picks.blocks == -(-length // block_size)
        shares = torch.rand(2, picks.full)
        if generator.random() < 0.3:
            shares.fill_(0.5)  # all equal
        check_selection(select(shares, picks), picks, glance, length, block_size)
        fewer += picks.reads < picks.blocks
        if glance.budget >= length:
            assert picks.reads == picks.blocks
    assert fewer > 200
    assert compared > 50


def test_the_best_blocks_are_chosen_and_the_mass_is_their_share() -> None:
    shares = torch.tensor([[0.05, 0.1, 0.3, 0.05, 0.2, 0.1, 0.1, 0.1]])
    picks = picks_of(Glance(6 * 16, 17), 8 * 16 + 1, 16)
    assert picks == Picks(blocks=9, full=8, sinks=1, recent=7, reads=6)
    selected = select(shares, picks)
    assert selected.tolist() == [[0, 1, 2, 4, 7, 8]]
    assert float(mass_of(shares, selected, picks)) == pytest.approx(0.75)


def test_shares_are_those_of_normal_keys() -> None:
    """The estimate is exact in the limit: exp(score) of many normal keys."""
    torch.manual_seed(0)
    dim, slots = 8, 200_000
    spreads = torch.tensor([0.5, 1.0, 1.5])
    keys = torch.randn(3, slots, 1, dim) * spreads[:, None, None, None] + torch.randn(3, 1, 1, dim)
    query = torch.randn(2, dim)
    mean, variance = summary_of(keys)
    estimated = shares_of(estimate_logs(query, mean, variance, 0.4))
    masses = torch.exp(torch.einsum("gd,bskd->gbs", query * 0.4, keys)).mean(dim=2)
    true = (masses / masses.sum(dim=1, keepdim=True)).mean(dim=0)
    assert torch.allclose(estimated[0], true, atol=0.01)


class Setting:
    """A fragmented pool with rows of random lengths, the same for every backend."""

    def __init__(self, seed: int, kv_format: str) -> None:
        generator = random.Random(seed)
        torch.manual_seed(seed)
        self.block_size = generator.choice([4, 5, 16, 33])
        lengths = [generator.randrange(3, 700) for _ in range(generator.randrange(1, 4))]
        counts = [-(-(length + 1) // self.block_size) for length in lengths]
        self.pool = KVPool.of_blocks(
            [SHAPE],
            sum(counts),
            block_size=self.block_size,
            dtype=torch.float32,
            device=CPU,
            slab_blocks=max(1, sum(counts) // 3),
            kv_format=kv_format,
            summaries=True,
        )
        every = self.pool.allocate(sum(counts))
        generator.shuffle(every)
        for slab in self.pool.slabs:
            for tensor in slab.layers[0].blocks.values():
                tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)
        self.rows = []
        for length, count in zip(lengths, counts, strict=True):
            table, every = every[:count], every[count:]
            key, value = torch.randn(length, 2, 32), torch.randn(length, 2, 32)
            self.pool.write(0, self.pool.runs(table, 0, length), key, value)
            self.rows.append(Row(Role.DECODE, table, length, 1))
        self.query = torch.randn(len(lengths), HEADS, 32)
        self.key, self.value = torch.randn(2, len(lengths), 2, 32)

    def attend(self, backend: Backend, rows: list[Row], call: AttentionCall = CALL) -> Step:
        step = Step(self.pool, tuple(rows), backend)
        self.out = step.attend(0, self.query, self.key, self.value, call)
        return step


def native(pool: KVPool) -> Backend:
    return make_native(pool)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("seed", range(12))
def test_the_native_kernels_choose_and_attend_like_the_twin(seed: int, kv_format: str) -> None:
    found = []
    for make in (lambda _: TorchBackend(), native):
        setting = Setting(seed, kv_format)
        generator = random.Random(seed)
        backend = make(setting.pool)
        capacity = max(len(row.blocks) for row in setting.rows)
        evidences = [Evidence(torch.zeros(1, 2, capacity)) for _ in setting.rows]
        slow = [row._replace(evidence=one) for row, one in zip(setting.rows, evidences, strict=True)]
        results = []
        for _ in range(3):  # slow rows, then slow and fast ones
            step = setting.attend(backend, slow)
            masses = step.mass if step.mass is not None else torch.ones(len(slow))
            results += [setting.out, masses, *(one.shares.clone() for one in evidences)]
            setting.query = torch.randn(setting.query.shape)
            slow = [
                row._replace(
                    evidence=one if generator.random() < 0.8 else None,
                    fast=Glance(
                        generator.randrange(1, row.length),
                        generator.randrange(1, 60),
                        generator.choice([1, 1.5, 3, 50]),
                    )
                    if generator.random() < 0.7
                    else None,
                )
                for row, one in zip(setting.rows, evidences, strict=True)
            ]
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 if kv_format == "auto" else 2e-2)


@pytest.mark.parametrize("make", [lambda _: TorchBackend(), native], ids=["torch", "native"])
@pytest.mark.parametrize("call", [CALL, replace(CALL, softcap=20.0), replace(CALL, sinks=torch.randn(HEADS))])
@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_a_budget_that_covers_the_context_is_exactly_dense(
    make: object, call: AttentionCall, kv_format: str
) -> None:
    setting = Setting(3, kv_format)
    backend = make(setting.pool)  # type: ignore[operator]
    setting.attend(backend, setting.rows, call)
    dense = setting.out
    step = setting.attend(backend, [row._replace(fast=Glance(row.length, 1)) for row in setting.rows], call)
    assert torch.equal(setting.out, dense)
    assert step.mass is None


@pytest.mark.parametrize("make", [lambda _: TorchBackend(), native], ids=["torch", "native"])
@pytest.mark.parametrize("call", [CALL, replace(CALL, softcap=20.0), replace(CALL, sinks=torch.randn(HEADS))])
@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_a_fast_row_attends_to_its_blocks_alone(make: object, call: AttentionCall, kv_format: str) -> None:
    """Compared with a dense row over a table of the chosen blocks, one KV head at a time."""
    setting = Setting(4, kv_format)
    pool, size = setting.pool, setting.block_size
    rows = [row._replace(fast=Glance(row.length // 3, 7)) for row in setting.rows]
    step = setting.attend(make(pool), rows, call)  # type: ignore[operator]
    out, store = setting.out, pool.stores[0]
    checked = 0
    for index, row in enumerate(rows):
        picks = step.picks[index]
        if picks is None:
            continue
        query = store.turn_query(setting.query)[index]
        selected = select(
            shares_of(estimate_logs(query, *summaries(pool, 0, row.blocks[: picks.full]), call.scale)), picks
        )
        length = row.length - (picks.blocks - picks.reads) * size
        for head, chosen in enumerate(selected.tolist()):
            short = Row(Role.DECODE, [row.blocks[block] for block in chosen], length - 1, 1)
            one = slice(index, index + 1)
            alone = Step(pool, (short,), TorchBackend()).attend(
                0, setting.query[one], setting.key[one], setting.value[one], call
            )
            heads = slice(3 * head, 3 * head + 3)
            torch.testing.assert_close(out[index, heads], alone[0, heads], rtol=1e-3, atol=2e-3)
            checked += 1
    assert checked


@pytest.mark.parametrize("make", [lambda _: TorchBackend(), native], ids=["torch", "native"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_of_the_blocks_that_are_compared_those_with_the_highest_true_shares_are_read(
    make: object, kv_format: str
) -> None:
    """Compared with a dense row over a table of these blocks."""
    setting = Setting(4, kv_format)
    pool, size = setting.pool, setting.block_size
    rows = [row._replace(fast=Glance(row.length // 4, 7, 1000)) for row in setting.rows]
    step = setting.attend(make(pool), rows, CALL)  # type: ignore[operator]
    out, store, changed, checked = setting.out, pool.stores[0], 0, 0
    for index, row in enumerate(rows):
        picks = step.picks[index]
        if picks is None:
            continue
        query = store.turn_query(setting.query)[index]
        keys, _ = pool.read(0, pool.runs(row.blocks, 0, picks.full * size))
        logs = estimate_logs(query, *summaries(pool, 0, row.blocks[: picks.full]), CALL.scale, SPREAD)
        shares = shares_of(logs)
        scores = CALL.scale * torch.einsum("kgd,skd->kgs", query.unflatten(0, (2, -1)), keys)
        means = torch.log(scores.exp().unflatten(2, (picks.full, size)).mean(dim=3))
        length = row.length - (picks.blocks - picks.reads) * size
        for head in range(2):
            between = range(picks.sinks, picks.recent)
            ranked = sorted(between, key=lambda block: -float(shares[head, block]))
            sure, rest = ranked[: picks.sure], ranked[picks.sure :]
            logs[head][:, rest] = means[head][:, rest]
            highest = torch.softmax(logs[head], dim=1).amax(dim=0)
            best = [*sure, *sorted(rest, key=lambda block: -float(highest[block]))[: picks.best - picks.sure]]
            changed += {*best} != {*ranked[: picks.best]}
            chosen = sorted([*range(picks.sinks), *best, *range(picks.recent, picks.blocks)])
            short = Row(Role.DECODE, [row.blocks[block] for block in chosen], length - 1, 1)
            one, heads = slice(index, index + 1), slice(3 * head, 3 * head + 3)
            alone = Step(pool, (short,), TorchBackend()).attend(
                0, setting.query[one], setting.key[one], setting.value[one], CALL
            )
            torch.testing.assert_close(out[index, heads], alone[0, heads], rtol=1e-3, atol=2e-3)
            checked += 1
    assert checked >= changed > 0


@pytest.mark.parametrize("make", [lambda _: TorchBackend(), native], ids=["torch", "native"])
def test_a_block_that_is_not_finite_is_seen_in_the_mass_even_if_it_is_not_chosen(make: object) -> None:
    setting = Setting(4, "auto")
    row = max(setting.rows, key=lambda row: row.length)
    index = setting.rows.index(row)
    block = row.blocks[len(row.blocks) // 2]
    key = torch.full((1, 2, 32), float("nan"))
    middle = (len(row.blocks) // 2) * setting.block_size
    setting.pool.write(0, setting.pool.runs(row.blocks, middle, middle + 1), key, key)
    last = middle + setting.block_size
    setting.pool.write(
        0, setting.pool.runs(row.blocks, last - 1, last), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    )
    assert summaries(setting.pool, 0, [block])[0].isnan().all()
    step = setting.attend(
        make(setting.pool),  # type: ignore[operator]
        [row._replace(fast=Glance(4 * setting.block_size, 1)) for row in setting.rows],
    )
    assert step.mass is not None
    assert not step.mass[index].isfinite()
