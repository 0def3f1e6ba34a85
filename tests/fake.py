"""A fake model whose keys are tokens and whose next token is a hash of the tokens it reads.

It reads through the block tables like a real model, so a block that is wrongly shared, copied, evicted or
reused changes the text. A step of the whole engine takes microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from skim.attention.cpu.torch_backend import TorchMetadata, write
from skim.attention.step import Step
from skim.config import EngineConfig, PrefillConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Event, Finished
from skim.memory.formats import AUTO, make_stores
from skim.memory.store import LayerShape, PlainStore, block_bytes
from skim.models.load import LoadedModel
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

VOCAB = 64
EOS = 63
SHAPE = LayerShape(kv_heads=1, key_dim=2, value_dim=1)
TOKEN_BYTES = PlainStore(SHAPE, torch.float32).bytes(1)
WIDE = LayerShape(kv_heads=1, key_dim=64, value_dim=8)
"""For quantized formats: numbers stand in the keys as bits, so that rounding does not change them."""
BITS, COPIES = 21, 3  # of a key: a token has 6 bits, a position 15


def next_token(tokens: Sequence[int], positions: Sequence[int] | None = None) -> int:
    """The fake model's next token after `tokens`. Never the end-of-text token."""
    state = 17
    for position, token in zip(positions or range(len(tokens)), tokens, strict=True):
        state = (state * 31 + token * 7 + position) % 1_000_003
    return state % (VOCAB - 1)


def continuation(prompt: Sequence[int], count: int, positions: Sequence[int] | None = None) -> list[int]:
    """The fake model's reply to `prompt`, whose tokens are at `positions` (default: 0, 1, 2, ...)."""
    tokens = list(prompt)
    places = list(positions) if positions is not None else list(range(len(tokens)))
    end = max(places) + 1
    for step in range(count):
        tokens.append(next_token(tokens, places))
        places.append(end + step)
    return tokens[len(prompt) :]


def keys_of(tokens: torch.Tensor, positions: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """[tokens] and [positions] as keys. [tokens, 1, key_dim]"""
    if shape.key_dim == SHAPE.key_dim:
        return torch.stack([tokens, positions], dim=-1).float()[:, None]
    bits = ((positions * VOCAB + tokens)[:, None] >> torch.arange(BITS)) & 1
    key = torch.ones(len(tokens), shape.key_dim)
    key[:, : BITS * COPIES] = (2.0 * bits - 1).repeat(1, COPIES)
    return key[:, None]


def numbers_of(keys: torch.Tensor) -> tuple[list[int], list[int]]:
    """The tokens and positions that keys stand for. [tokens, 1, key_dim]"""
    if keys.shape[2] == SHAPE.key_dim:
        stacked = keys[:, 0].long()
        return stacked[:, 0].tolist(), stacked[:, 1].tolist()
    votes = keys[:, 0, : BITS * COPIES].view(-1, COPIES, BITS).sum(dim=1) > 0
    numbers = (votes.long() << torch.arange(BITS)).sum(dim=1)
    return (numbers % VOCAB).tolist(), (numbers // VOCAB).tolist()


class FakeModule:
    """Raises `fail_next` in the next forward. With `nan_next`, the next logits contain a NaN.

    Tokens in `nan_tokens` have a NaN as their value. With `guesses`, some tokens of fast rows are wrong.
    """

    def __init__(self) -> None:
        self.fail_next: Exception | None = None
        self.nan_next = False
        self.nan_tokens: set[int] = set()
        self.guesses = False

    def modules(self) -> Iterator[Any]:
        return iter(())

    parameters = buffers = modules  # it has no weights

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        skim_step: Step,
    ) -> Any:
        shape = skim_step.pool.layers[0]
        key = keys_of(input_ids[0], position_ids[0], shape)
        value = input_ids[0].float()[:, None, None].repeat(1, 1, shape.value_dim)
        for token in self.nan_tokens:
            value[input_ids[0] == token] = float("nan")
        last = len(skim_step.pool.layers) - 1
        skim_step.check(last, key, value)
        metadata = TorchMetadata(skim_step)
        for layer in range(last + 1):
            write(skim_step.pool, metadata, layer, key, value)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        wanted = set(logits_to_keep.tolist())
        logits = []
        for row, start in zip(skim_step.rows, skim_step.cumulative_lengths, strict=False):
            tokens, positions = read_keys(skim_step, row, 0)
            for layer, shape in enumerate(skim_step.pool.layers[1:], start=1):
                first = row.first_slot(shape.window)
                seen = read_keys(skim_step, row, layer, first)
                assert seen == (tokens[first:], positions[first:]), "a window holds other keys"
            expected = [row.position(slot) for slot in range(row.length)]
            assert positions == expected, "a slot holds the key of another position"
            in_order = all(a < b for a, b in itertools.pairwise(positions))
            assert row.in_order == in_order, "`Row.in_order` does not match the positions"
            for query in range(row.queries):
                if start + query in wanted:
                    seen_slots = row.context + query + 1
                    token = next_token(tokens[:seen_slots], positions[:seen_slots])
                    if self.guesses and row.fast is not None and token % 3 == 0:
                        token = (token + 1) % VOCAB
                    logits.append(torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float())
        stacked = torch.stack(logits) if logits else torch.zeros(0, VOCAB)
        if self.nan_next and logits:
            self.nan_next = False
            stacked[0, 3] = float("nan")
        return SimpleNamespace(logits=stacked[None])


def read_keys(step: Step, row: Any, layer: int, first: int = 0) -> tuple[list[int], list[int]]:
    table = row.table(step.pool.group_of[layer])
    keys, _ = step.pool.gather(layer, step.pool.runs(table, first, row.length))
    return numbers_of(keys)


class FakeTokenizer:
    """Decodes token 7 as ` 7`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in ids if not (skip_special_tokens and token == EOS))


def fake_engine(
    *,
    blocks: int,
    block_size: int = 4,
    slab_blocks: int | None = None,
    windows: Sequence[int] = (),
    **settings: Any,
) -> Engine:
    """An engine with the fake model. Its thread is not started.

    The first layer reads everything. There is one more layer for each of the sliding `windows`.
    """
    module = FakeModule()
    kv_format = settings.get("kv_cache_dtype", AUTO)
    shape = SHAPE if kv_format == AUTO else WIDE
    layers = (shape, *(replace(shape, window=window) for window in windows))
    model = LoadedModel(
        name="fake",
        path=Path("fake"),
        module=module,
        tokenizer=FakeTokenizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_positions=settings.pop("max_positions", 4096),
        vocab_size=VOCAB,
        eos_token_ids=frozenset({EOS}),
        layers=layers,
    )
    size = block_size * TOKEN_BYTES
    summaries = settings.get("slow_fast", "off") != "off"
    if kv_format != AUTO:  # one group: its blocks have all layers
        size = block_bytes(make_stores(layers, torch.float32, kv_format, summaries=summaries), block_size)
    elif summaries:
        size = block_bytes(make_stores(layers[:1], torch.float32, summaries=True), block_size)
    settings.setdefault("kv_memory", blocks * size)
    config = EngineConfig.of(block_size=block_size, **settings)
    engine = Engine(model, config)
    if slab_blocks is not None:
        engine.core.memory.pool.slab_blocks = min(slab_blocks, blocks)
    return engine


def submit(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    prefill: PrefillConfig | None = None,
    emit: Callable[[Event], None] | None = None,
    **options: Any,
) -> RequestHandle:
    """Submit a prompt to any engine. `prefill` defaults to the engine's settings."""
    request = Request(prompt, params, prefill or engine.config.prefill, **options)  # type: ignore[arg-type]
    return engine.submit(request, emit)


def run_together(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The tokens of replies to prompts that are submitted together.

    Steps run one by one, with a check of memory after each, so runs are the same.
    """
    handles = [submit(engine, prompt, params) for prompt in prompts]
    while engine.step():
        engine.core.memory.check()
    found = []
    for handle in handles:
        *deltas, last = handle
        assert isinstance(last, Finished)
        found.append([token for delta in deltas for token in delta.token_ids])
    return found
