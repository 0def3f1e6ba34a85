"""Other tile sizes and other launches of a fast layer, for `slow_fast.py`: what its parts cost apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from slow_fast_layer import BLOCK_SIZE, DEVICE, DIM, GROUP, KV_HEADS, Bench, time_layers

from skim.attention.cuda import glance as launches
from skim.attention.cuda import launch, metadata
from skim.attention.cuda.glance import NewTokens, ScoreConfig
from skim.attention.cuda.glance_select import list_blocks
from skim.attention.cuda.launch import Chosen, Config
from skim.attention.cuda.write import Summaries, write_keys_values
from skim.memory.summary import MEAN, VARIANCE

OLD_SCORE, OLD_ATTEND, OLD_PROGRAMS = ScoreConfig(64, 4, 2, 4), Config(16, 64, 4, 2), 4
SCORES = [ScoreConfig(*one) for one in (
    (64, 4, 3, 2), (64, 4, 3, 4), (64, 4, 7, 2), (64, 8, 5, 2), (32, 4, 5, 4), (128, 8, 3, 2), (64, 4, 5, 3),
)]  # fmt: skip
ATTENDS = [(Config(16, *one), programs) for one, programs in (
    ((64, 4, 3), 4), ((64, 4, 3), 2), ((64, 4, 5), 1), ((64, 4, 7), 2), ((32, 4, 5), 4), ((64, 8, 5), 2),
)]  # fmt: skip


@triton.jit
def list_kernel(
    score_ptr, part_ptr, list_ptr, mass_ptr, rows_ptr, blocks_ptr, picks_ptr, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    PACK: tl.constexpr, PAD_SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The lists in a launch of their own, for rows without evidence."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    here = row * KV_HEADS + head
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    list_blocks(
        score_ptr + here * ((GROUP + 1) * WIDTH), part_ptr + here * (2 * GROUP * splits),
        list_ptr + here * WIDTH, mass_ptr + here, table_ptr, picks_ptr + 4 * row, score_ptr, 0,
        tl.load(rows_ptr + 4 * row + 1), splits, GROUP, WIDTH, PIECE, PACK, PAD_SPLITS, BLOCK_SIZE,
    )  # fmt: skip


class Variants(Bench):
    """Times variants of the parts of a layer with plain keys."""

    def time_scores(self, config: ScoreConfig) -> float:
        """Without lists: no program takes itself for the last one."""
        known = unlisted(self.known())
        return time_layers(self.pool, lambda layer: self.choose(layer, known, None, config))

    def list_apart(self, warps: int) -> Callable[[], Chosen]:
        """Launches the lists alone, from scores that are not defined but for their shape."""
        known = self.known()
        fast, width, count = known.fast, known.fast.width, known.decode[None].table.shape[0]
        splits = launches.splits_of(width, KV_HEADS * count, metadata.processors(DEVICE), OLD_SCORE)
        scores = torch.randn(count, KV_HEADS, GROUP + 1, width, device=DEVICE)
        parts = torch.rand(count, KV_HEADS, 2, GROUP, splits, device=DEVICE)
        masses = torch.empty(count, KV_HEADS, device=DEVICE)
        lists = torch.empty(count, KV_HEADS, width, dtype=torch.int32, device=DEVICE)

        def launch_lists() -> Chosen:
            list_kernel[(KV_HEADS, count)](
                scores, parts, lists, masses, known.of(0).rows, known.of(0).blocks, fast.picks, splits,
                GROUP=GROUP, KV_HEADS=KV_HEADS, WIDTH=width, PIECE=min(width, 64 * 32 * warps // GROUP),
                PACK=GROUP, PAD_SPLITS=triton.next_power_of_2(splits), BLOCK_SIZE=BLOCK_SIZE, num_warps=warps,
            )  # fmt: skip
            return Chosen(lists, fast.picks)

        return launch_lists

    def time_layer(
        self,
        score: ScoreConfig | None = None,
        attend: tuple[Config, int] | None = None,
        apart: Sequence[str] = (),
    ) -> float:
        """A layer of plain keys, with some parts in a launch of their own."""
        config, programs = attend or (None, None)
        known = self.known(programs)
        listing = unlisted(self.known(programs)) if "lists" in apart else known
        tiles = replace(known.decode[None], ended=None) if "merge" in apart else known.decode[None]
        lists = self.list_apart(8) if "lists" in apart else None
        new, slots = NewTokens(self.key, self.value), known.of(0).slot_mapping

        def layer_of(layer: int) -> None:
            if "write" in apart:
                source, planes = known.source(layer), self.pool.planes(layer).blocks
                into = Summaries(planes[MEAN], planes[VARIANCE], BLOCK_SIZE)
                write_keys_values(self.key, self.value, source.keys, source.values, slots, into)
            chosen = self.choose(layer, listing, None if "write" in apart else new, score)
            self.attend(layer, known, lists() if lists else chosen, tiles, config)

        return time_layers(self.pool, layer_of)

    def try_variants(self) -> None:
        """Other tile sizes and other launches of a layer with plain keys."""
        both = self.scored + self.read
        ours = launches.score_config(DIM, torch.bfloat16, self.step.metadata.fast.width)
        plain = launch.decode_config(self.pool.layers[0], GROUP, torch.bfloat16, few=True)
        early = (replace(plain, early=True), metadata.FAST_PROGRAMS)
        old = (OLD_ATTEND, OLD_PROGRAMS)
        every = ("write", "lists", "merge")
        kinds: dict[str, Callable[[], float]] = {
            "layer, early launches": lambda: self.time_layer(replace(ours, early=True), early),
            "layer, early attention alone": lambda: self.time_layer(None, early),
            "layer, write apart": lambda: self.time_layer(apart=["write"]),
            "layer, merge apart": lambda: self.time_layer(apart=["merge"]),
            "layer, lists apart": lambda: self.time_layer(apart=["lists"]),
            "layer, all apart": lambda: self.time_layer(apart=every),
            "layer as it was": lambda: self.time_layer(OLD_SCORE, old, every),
        }
        self.try_all("", both, list(kinds), lambda kind: kinds[kind]())
        self.try_all("score alone", self.scored, [ours, OLD_SCORE], self.time_scores)
        lists = {warps: self.list_apart(warps) for warps in (4, 8)}
        self.try_all("list, warps", 0, list(lists), lambda n: time_layers(self.pool, lambda _: lists[n]()))
        self.try_all("score and list", self.scored, SCORES, self.time_choice)
        self.try_all("attend", self.read, ATTENDS, lambda kind: self.time_attention(*kind))
        self.try_all("attend, as it was", self.read, [old], lambda kind: self.time_attention(*kind, False))


def unlisted(known: metadata.CudaMetadata) -> metadata.CudaMetadata:
    """Metadata with which the choosing kernel scores blocks and lists none."""
    never = torch.full_like(known.tables.ended, -(2**30))
    known.decode = {window: replace(tiles, ended=never) for window, tiles in known.decode.items()}
    return known
