"""Logits computed through the KV pool equal those of transformers' eager attention, in every family."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from skim.attention import hook
from skim.attention.backend import choose_backend
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import Role, Row, Step
from skim.memory.manager import BlockTable, MemoryManager
from skim.memory.pool import KVPool
from skim.memory.prefix import Namespace
from skim.models.forwards.lean import lean_layers
from skim.models.probe import probe_layers
from tests import paths, tiny
from tests.models.quantized.restored import restored_model

TOLERANCE = 2e-4
FAMILIES = [*tiny.CONFIGS, "smollm2-135m"]


class Case:
    """Two copies of a model: one with transformers' eager attention, one on a KV pool."""

    def __init__(self, eager: Any, ours: Any, longest: int, text: list[int] | None = None) -> None:
        hook.register()
        self.eager, self.ours, self.longest, self.text = eager, ours, longest, text
        self.ours.set_attn_implementation(hook.NAME)
        self.layers = probe_layers(self.ours, "test")
        lean_layers(self.ours)  # as an engine does; some families are left unchanged
        self.vocab = self.eager.config.get_text_config().vocab_size

    def memory(self, block_size: int = 8) -> MemoryManager:
        pool = KVPool(
            self.layers,
            block_size=block_size,
            budget_bytes=2**28,
            dtype=torch.float32,
            device=torch.device("cpu"),
            slab_bytes=2**22,
        )
        return MemoryManager(pool)

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        """Random tokens, or for a trained model a random piece of real text.

        On random tokens a trained model's activations are so large that transformers' own float32 and
        float64 logits are 4e-4 apart.
        """
        if self.text is not None:
            start = rng.randrange(len(self.text) - length)
            return self.text[start : start + length]
        return [rng.randrange(self.vocab) for _ in range(length)]

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits after every token. [tokens, vocab]"""
        return self.eager(torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, memory: MemoryManager, rows: list[tuple[BlockTable, list[int]]]) -> list[torch.Tensor]:
        """Run one step over all rows; return the logits after each row's tokens."""
        for table, tokens in rows:
            memory.extend(table, len(tokens))
        step = Step(
            memory.pool,
            tuple(Row(Role.PREFILL, table.blocks, table.length, len(tokens)) for table, tokens in rows),
            TorchBackend(),
        )
        flat = torch.tensor([[token for _, tokens in rows for token in tokens]])
        logits = self.ours(
            flat, position_ids=torch.tensor([step.positions]), use_cache=False, skim_step=step
        ).logits[0]
        for table, tokens in rows:
            table.length += len(tokens)
        memory.check()
        return [
            logits[a:b] for a, b in zip(step.cumulative_lengths, step.cumulative_lengths[1:], strict=False)
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "smollm2-135m":
        path: Path = request.getfixturevalue("default_model_dir")
        models = [restored_model(path) for _ in range(2)]
        text = paths.LICENSE
        yield Case(*models, longest=150, text=AutoTokenizer.from_pretrained(path).encode(text))
    else:
        yield Case(tiny.build(request.param), tiny.build(request.param), longest=150)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(ours).all()
    assert (ours - expected).abs().max().item() <= TOLERANCE


def test_the_reference_has_logits_worth_comparing(case: Case) -> None:
    logits = case.expected(case.prompt(random.Random(0), 20))
    assert logits.std().item() > 0.3
    assert logits.argmax(-1).unique().numel() > 3


def test_one_shot_prefill(case: Case) -> None:
    memory, tokens = case.memory(), case.prompt(random.Random(1), case.longest)
    assert_close(case.forward(memory, [(memory.open(), tokens)])[0], case.expected(tokens))


def test_chunked_prefill(case: Case) -> None:
    rng = random.Random(2)
    memory, tokens = case.memory(), case.prompt(rng, case.longest)
    table, logits, done = memory.open(), [], 0
    while done < len(tokens):
        chunk = tokens[done : done + rng.choice([1, 3, 8, 31, 64])]
        logits += case.forward(memory, [(table, chunk)])
        done += len(chunk)
    assert_close(torch.cat(logits), case.expected(tokens))


@pytest.mark.parametrize("shared", [40, 43])
def test_prefill_after_a_shared_prefix(case: Case, shared: int) -> None:
    """43 tokens end inside a block of 8: the tail is copied, and the first request is unaffected."""
    rng = random.Random(3)
    memory, first = case.memory(), case.prompt(rng, 90)
    second = [*first[:shared], (first[shared] + 1) % case.vocab, *case.prompt(rng, 30)]
    one = memory.open()
    case.forward(memory, [(one, first)])
    memory.publish(one, first, Namespace())
    match = memory.match(second, Namespace())
    assert match.length == shared
    two = memory.open(match)
    logits = case.forward(memory, [(two, second[shared:])])[0]
    assert_close(logits, case.expected(second)[shared:])
    more = case.prompt(rng, 5)
    assert_close(case.forward(memory, [(one, more)])[0], case.expected(first + more)[90:])


def test_decode(case: Case) -> None:
    memory, tokens = case.memory(), case.prompt(random.Random(4), 70)
    table = memory.open()
    case.forward(memory, [(table, tokens[:40])])
    logits = [case.forward(memory, [(table, [token])])[0] for token in tokens[40:]]
    assert_close(torch.cat(logits), case.expected(tokens)[40:])


def test_mixed_batch_of_prefill_chunks_and_decode_rows(case: Case) -> None:
    rng = random.Random(5)
    memory = case.memory()
    sizes = [(60, 1), (0, 33), (17, 1), (25, 40), (0, 1), (100, 7), (9, 9)]  # (computed, new)
    rows = [(memory.open(), case.prompt(rng, computed + new), computed) for computed, new in sizes]
    for table, tokens, computed in rows:
        if computed:
            case.forward(memory, [(table, tokens[:computed])])
    logits = case.forward(memory, [(table, tokens[computed:]) for table, tokens, computed in rows])
    for (_, tokens, computed), got in zip(rows, logits, strict=True):
        assert_close(got, case.expected(tokens)[computed:])


def slots(rng: random.Random, length: int, kind: str) -> tuple[list[int], list[tuple[int, int, Role]]]:
    """Choose a subset of a prompt: (positions of its slots, steps that compute them).

    Unless `kind` is "in order", some tokens get a later slot than tokens after them.
    """
    kept = [0, *sorted(rng.sample(range(1, length - 6), 49)), *range(length - 6, length)]
    late = [kept.pop(place) for place in sorted(rng.sample(range(5, 40), 12), reverse=True)]
    if kind == "in order":
        late = []
    kept[-6:-6] = sorted(late)
    end = len(kept)
    bounds = sorted({0, 20, 21, end - 8 - len(late), end - 8, end - 6, end - 3})
    steps = [(a, b, Role.PREFILL) for a, b in itertools.pairwise(bounds)]
    return kept, [*steps, *((i, i + 1, Role.DECODE) for i in range(end - 3, end))]


@pytest.mark.parametrize("kind", ["in order", "backfilled"])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@torch.inference_mode()
def test_a_subset_of_a_prompt_at_its_original_positions(case: Case, kind: str, native: bool) -> None:
    """Skipped tokens have no effect, distances are preserved, backfilled tokens read only earlier ones."""
    rng = random.Random(6)
    length = 80
    tokens = case.prompt(rng, length)
    kept, steps = slots(rng, length, kind)
    assert (kept != sorted(kept)) == (kind == "backfilled")
    memory = case.memory()
    table = memory.open()
    memory.extend(table, len(kept))
    backend = choose_backend(memory.pool) if native else TorchBackend()
    logits = []
    for start, end, role in steps:
        row = Row(role, table.blocks, start, end - start, kept, kind != "backfilled")
        step = Step(memory.pool, (row,), backend)
        part = torch.tensor([[tokens[i] for i in kept[start:end]]])
        logits.append(
            case.ours(
                part, position_ids=torch.tensor([step.positions]), use_cache=False, skim_step=step
            ).logits[0]
        )
    positions = torch.tensor(kept)
    distance = positions[:, None] - positions[None, :]
    computed = torch.ones(len(kept), len(kept), dtype=torch.bool).tril()
    full = torch.where((distance >= 0) & computed, 0.0, -torch.inf)[None, None]
    near = torch.where((distance >= 0) & computed & (distance < tiny.WINDOW), 0.0, -torch.inf)[None, None]
    config = case.eager.config
    kinds = set(getattr(config, "layer_types", None) or [])
    mask: Any = {"full_attention": full, "sliding_attention": near}
    if "sliding_attention" not in kinds:
        mask = near if getattr(config, "sliding_window", None) and not kinds else full
    expected = case.eager(
        torch.tensor([[tokens[i] for i in kept]]),
        attention_mask=mask,
        position_ids=positions[None],
        use_cache=False,
    ).logits[0]
    assert_close(torch.cat(logits), expected)
