"""Rankings of blocks for fast decode steps: the share of the true attention mass that their selections hold.

The model reads a book, then dense decode steps follow the text. In each step and layer, every ranking selects
blocks for the same query. `mass` is the true share that the selected blocks hold, mean over steps, layers and
KV heads, and `worst` that of the worst tenth of them. `error` is the error of the attention's output relative
to its length. `oracle` ranks by the true mass. `evidence` is the true mass of the last slow step, smoothed.
`correlation` is that of the estimated mass of a step with its true mass.

    python benchmarks/rankings.py [--tokens 6000] [--steps 130] [--budget 1024] [--block-sizes 16 32 64]
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from script import parser_of, positive, run, tell

from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.glance import RECENT, Glance, Picks, estimate_logs, picks_of, select, shares_of
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.config import ModelConfig
from skim.engine.runner import RowInput, Runner
from skim.measure.book import packaged_text
from skim.memory.pool import KVPool
from skim.memory.summary import summary_of
from skim.models.load import load
from skim.models.source import prepare

CHUNK = 512
POOL_BLOCK = 64
KEPT = 0.5  # of earlier evidence at a slow step


class Judge(TorchBackend):
    """Attends densely, and judges rankings in decode steps."""

    def __init__(self, block_sizes: list[int], budget: int, interval: int) -> None:
        super().__init__()
        self.block_sizes = block_sizes
        self.budget = budget
        self.interval = interval
        self.step = 0
        self.figures: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self.estimates: dict[tuple[int, str], dict[int, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._summaries: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._evidence: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        out = super().attend(step, layer, query, key, value, call)
        if step.rows[0].role is Role.DECODE:
            runs = step.metadata.runs(0, step.pool.group_of[layer])
            self.judge(layer, query[0], *step.pool.gather(layer, runs), call, out[0])
        return out

    def judge(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: AttentionCall,
        out: torch.Tensor,
    ) -> None:
        length, kv_heads, dim = keys.shape
        grouped = query.view(kv_heads, -1, dim)
        weights = torch.softmax(torch.einsum("kgd,skd->kgs", grouped * call.scale, keys), dim=2)
        for size in self.block_sizes:
            picks = picks_of(Glance(self.budget, RECENT), length, size)
            of = torch.arange(length) // size
            true = torch.zeros(kv_heads, picks.blocks).index_add_(1, of, weights.mean(dim=1))
            mean, variance = self._summarize(layer, size, keys, picks.full)
            slow = self.step % self.interval == 0
            evidence = self._renew(layer, size, true[:, : picks.full], slow)
            if slow:
                continue
            summary = shares_of(estimate_logs(query, mean, variance, call.scale))
            only_mean = shares_of(estimate_logs(query, mean, torch.zeros_like(variance), call.scale))
            half = shares_of(estimate_logs(query, mean, variance / 2, call.scale))
            rankings = {
                "oracle": true[:, : picks.full],
                "summary": summary,
                "half the variance": half,
                "mean only": only_mean,
                "evidence": evidence,
                "summary + evidence": summary + evidence,
                "positional": torch.arange(picks.full).float().expand(kv_heads, -1),
            }
            for name, shares in rankings.items():
                self._count(layer, size, name, shares, picks, true, of, weights, values, out)

    def _count(
        self,
        layer: int,
        size: int,
        name: str,
        shares: torch.Tensor,
        picks: Picks,
        true: torch.Tensor,
        of: torch.Tensor,
        weights: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        selected = select(shares, picks)
        chosen = torch.zeros(true.shape, dtype=torch.bool).scatter_(1, selected, True)
        mass = (true * chosen).sum(dim=1)
        kept = weights * chosen[:, of][:, None]
        kept = kept / kept.sum(dim=2, keepdim=True)
        got = torch.einsum("kgs,skd->kgd", kept, values).reshape(out.shape)
        error = (got - out).norm(dim=1) / out.norm(dim=1)
        self.figures[size, name].append((mass, error))
        estimated = (shares * chosen[:, : picks.full]).sum(dim=1).mean()
        self.estimates[size, name][self.step].append((float(estimated), float(mass.mean())))

    def _summarize(
        self, layer: int, size: int, keys: torch.Tensor, full: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._summaries.get((layer, size))
        first = len(known[0]) if known is not None else 0
        if full > first:
            new = summary_of(keys[first * size : full * size].view(full - first, size, *keys.shape[1:]))
            pair = new if known is None else tuple(torch.cat(both) for both in zip(known, new, strict=True))
            self._summaries[layer, size] = (pair[0], pair[1])
        return self._summaries[layer, size]

    def _renew(self, layer: int, size: int, true: torch.Tensor, slow: bool) -> torch.Tensor:
        before = self._evidence.get((layer, size), true)
        before = torch.nn.functional.pad(before, (0, true.shape[1] - before.shape[1]))
        if slow:
            before = KEPT * before + (1 - KEPT) * true
        self._evidence[layer, size] = before
        return before


@torch.inference_mode()
def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positive, default=6000)
    parser.add_argument("--steps", type=positive, default=130)
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--interval", type=positive, default=64, help="steps between slow ones")
    parser.add_argument("--block-sizes", type=positive, nargs="+", default=[16, 32, 64])
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    model = load(prepare(options.model), ModelConfig(device="cpu"))
    ids = model.tokenizer(packaged_text()[: 8 * (options.tokens + options.steps)])["input_ids"]
    blocks = -(-(options.tokens + options.steps) // POOL_BLOCK)
    pool = KVPool.of_blocks(
        model.layers, blocks, block_size=POOL_BLOCK, dtype=model.dtype, device=model.device
    )
    table = pool.allocate(blocks)
    judge = Judge(options.block_sizes, options.budget, options.interval)
    forward = partial(Runner(model.module, pool, judge).forward)
    for start in range(0, options.tokens, CHUNK):
        end = min(start + CHUNK, options.tokens)
        tell(f"prefill {end} of {options.tokens}")
        row = Row(Role.PREFILL, table, start, end - start)
        forward([RowInput(row, ids[start:end], wants_logits=True)])
    for step in range(options.steps):
        tell(f"step {step} of {options.steps}")
        judge.step, at = step, options.tokens + step
        forward([RowInput(Row(Role.DECODE, table, at, 1), ids[at : at + 1], wants_logits=True)])
    print(f"| block size | ranking | mass | worst | error | correlation |\n|{'---|' * 6}")
    for (size, name), figures in judge.figures.items():
        mass = torch.cat([mass for mass, _ in figures])
        error = torch.cat([error for _, error in figures])
        worst = mass.sort().values[: len(mass) // 10].mean()
        steps = torch.tensor(
            [torch.tensor(pairs).mean(dim=0).tolist() for pairs in judge.estimates[size, name].values()]
        )
        correlation = torch.corrcoef(steps.T)[0, 1] if name != "positional" else torch.tensor(torch.nan)
        print(
            f"| {size} | {name} | {mass.mean():.1%} | {worst:.1%} | {error.mean():.1%} | {correlation:.2f} |"
        )
    return 0


if __name__ == "__main__":
    run(main)
