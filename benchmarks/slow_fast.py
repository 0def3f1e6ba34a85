"""A layer of a fast decode step: scores of block summaries, choice of blocks, attention over the chosen.

    PYTHONPATH=src python benchmarks/slow_fast.py

Heads are those of an 8B model. Results are first compared with attention in float32 over the chosen blocks,
and the choice with the plain one. Each part is then timed alone and all of them together, in a captured graph
over several layers. For the last batch and context, several tile sizes are tried, and the same layer in more
launches: the lists, the write of the new token, and the merge of splits in a launch of their own. Blocks are
scattered.
"""

from __future__ import annotations

import time

import torch
from script import need_cuda, parser_of, positive, run
from slow_fast_layer import (
    BLOCK_SIZE,
    CALL,
    DEVICE,
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    Recording,
    make_pool,
    make_step,
    noise,
)
from slow_fast_variants import Variants

from skim.attention.glance import Glance, mass_of, shares_of
from skim.attention.glance_plain import summaries
from skim.memory.formats import AUTO, FORMATS
from skim.memory.pool import KVPool


def check(pool: KVPool) -> None:
    """Print the largest errors of rows of several lengths; exit if one is too large."""
    glances = (Glance(2048), Glance(1024, 64), None, Glance(640, 1), Glance(2048), Glance(512))
    lengths = (6_000, 5_003, 4_999, 3_264, 20_011, 63)
    step = make_step(pool, list(zip(lengths, glances, strict=True)))
    tokens = len(step.rows)
    query, key, value = noise(tokens, HEADS), noise(tokens, KV_HEADS), noise(tokens, KV_HEADS)
    out = step.attend(0, query, key, value, CALL)
    assert isinstance(step.backend, Recording)
    assert step.backend.chosen is not None
    lists = step.backend.chosen.blocks.cpu()
    worst = missed = drift = 0.0
    for index, row in enumerate(step.rows):
        stored = pool.gather(0, pool.runs(row.blocks, 0, row.length))
        keys, values = (t.float().transpose(0, 1) for t in stored)
        seen = torch.ones(KV_HEADS, row.length, dtype=torch.bool, device=DEVICE)
        picks = step.picks[index]
        if picks is not None:
            place = {page: at for at, page in enumerate(row.blocks)}
            pages = lists[index, :, : picks.reads].tolist()
            chosen = torch.tensor([[place[page] for page in own] for own in pages], device=DEVICE)
            assert bool((chosen.diff(dim=1) > 0).all()), "a list does not ascend"
            taken = torch.zeros(KV_HEADS, picks.blocks, dtype=torch.bool, device=DEVICE)
            taken.scatter_(1, chosen, True)
            assert bool(taken[:, : picks.sinks].all()), "a sink is missing"
            assert bool(taken[:, picks.recent :].all()), "a recent block is missing"
            seen = taken.repeat_interleave(BLOCK_SIZE, 1)[:, : row.length]
            turned = pool.stores[0].turn_query(query[index : index + 1])[0]
            shares = shares_of(turned, *summaries(pool, 0, row.blocks[: picks.full]), CALL.scale)
            between = slice(picks.sinks, picks.recent)
            for own, kept in zip(shares[:, between], taken[:, between], strict=True):
                missed = max(missed, float(own[~kept].max() / own[kept].min()) - 1)
            mass = step.metadata.fast.mass[index, :KV_HEADS].mean()  # of the first layer
            drift = max(drift, abs(float(mass - mass_of(shares, chosen, picks))))
        scores = query[index].float().view(KV_HEADS, GROUP, DIM) @ keys.transpose(1, 2) * CALL.scale
        weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=2)
        expected = (weights @ values).view(HEADS, DIM)
        worst = max(worst, float((out[index].float() - expected).norm() / expected.norm()))
    print(f"{pool.kv_format}: error {worst:.1e}, best block missed by {missed:.1e}, mass off by {drift:.1e}")
    if not (worst < 2e-2 and missed < 5e-2 and drift < 1e-2):  # NaN is no success
        raise SystemExit("results are wrong")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--budget", type=positive, default=2048)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[AUTO, "int8"])
    parser.add_argument("--contexts", nargs="+", type=positive, default=[4096, 32_768, 135_168, 131_072])
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 4])
    args = parser.parse_args()
    need_cuda(parser)
    torch.manual_seed(0)
    begun = time.perf_counter()
    most = max(args.batches) * -(-max(args.contexts) // BLOCK_SIZE)
    for kv_format in args.formats:
        pool = make_pool(kv_format, args.layers, max(most, 800))
        check(pool)
        for batch in args.batches:
            for context in args.contexts:
                variants = context == args.contexts[-1] and batch == args.batches[-1]
                bench = Variants(pool, batch, context, args.budget)
                bench.run(variants)
                if variants and not bench.coded:
                    bench.try_variants()
        del pool
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    run(main)
