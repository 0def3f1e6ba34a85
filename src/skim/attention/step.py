"""The rows of one forward: the object that travels to every attention layer.

A step is one flattened run of tokens without padding: the new tokens of every row, one row after the other. A
row is a prefill chunk, a decode token, or drafts that are verified; layers do not distinguish them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from skim.attention.blocksparse.policy import Policy
from skim.attention.glance import Evidence, Glance, Picks, picks_of
from skim.attention.watch import Watch, highest_shares
from skim.memory.pool import KVPool

if TYPE_CHECKING:
    from skim.attention.backend import Backend


class Role(Enum):
    """The kind of a row. A row that verifies drafts is a chunk: it has the role PREFILL."""

    PREFILL = "prefill"
    DECODE = "decode"


class Row(NamedTuple):
    """One sequence's part in a step: `queries` new tokens after `context` slots that are already written."""

    role: Role
    blocks: Sequence[int]  # the block table; slot i is at blocks[i // block_size], offset i % block_size
    context: int
    queries: int
    positions: Sequence[int] | None = None
    """Positions of at least `context + queries` slots, in any order; None if slot i holds position i."""
    ascending: bool = False
    """True if positions increase. False is safe, only slower."""
    policy: Policy | None = None
    """Selects the key blocks that a prefill chunk reads; None for all. Backends may always read more."""
    prompt: int = 0
    """With a policy, the slots of the whole prompt: queries in its last blocks read everything."""
    others: Sequence[Sequence[int]] = ()
    """The block tables of further layer groups. Blocks that ended behind a sliding window are absent."""
    fast: Glance | None = None
    """Set for a fast decode row, which reads selected blocks in layers with summaries; None reads all."""
    evidence: Evidence | None = None
    """Of a row under slow-fast decode: a slow row renews it by its first query, a fast row ranks blocks by
    it. A backend that leaves it alone ranks by summaries only."""
    watch: Watch | None = None
    """Of a prefill chunk that reaches the end of its prompt, under slow-fast decode."""

    def table(self, group: int) -> Sequence[int]:
        """The block table of a layer group."""
        return self.others[group - 1] if group else self.blocks

    @property
    def length(self) -> int:
        return self.context + self.queries

    @property
    def in_order(self) -> bool:
        """True if positions increase with slots, so that a sliding window covers a run of slots."""
        return self.positions is None or self.ascending

    @property
    def sees_all_before(self) -> bool:
        """True if every query may read all slots before its own, apart from sliding windows.

        A decode token always may: its position is the highest, in any order of the others.
        """
        return self.in_order or self.role is Role.DECODE

    def picks(self, block_size: int) -> Picks | None:
        """The blocks that a fast row reads; None if it reads everything, as a slow row does."""
        if self.fast is None:
            return None
        picks = picks_of(self.fast, self.length, block_size)
        return picks if picks.reads < picks.blocks else None

    def position(self, slot: int) -> int:
        return slot if self.positions is None else self.positions[slot]

    def first_slot(self, window: int | None) -> int:
        """The first slot that any of the row's queries may read through a sliding window."""
        if window is None or not self.in_order:
            return 0
        out_of_reach = self.position(self.context) - window
        if self.positions is None:
            return max(0, out_of_reach + 1)
        return bisect.bisect_right(self.positions, out_of_reach, hi=self.context)


@dataclass(frozen=True)
class AttentionCall:
    """The scoring parameters of one layer, as transformers passes them."""

    scale: float
    window: int | None = None  # a query at position p reads keys at positions above p - window
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [query_heads] logits that join the softmax and have no value
    rounds: bool = False  # of a forward that only ranks: the inputs may be rounded to bfloat16


class Attention(Protocol):
    """Anything that can be passed to a forward as `skim_step`.

    Tensors passed to `attend` are valid during the call only: a compiled layer reuses their memory.
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor: ...  # [tokens, query_heads, value_dim]


class Ranking:
    """Base of steps whose forward ranks tokens and generates none.

    Its products may be rounded to 8 bits, and its attention to bfloat16.
    """


class Tail(NamedTuple):
    """The tokens of a step whose last hidden state is read."""

    step: Step  # the end of each row, if any of it is read
    tokens: torch.Tensor  # their indices in the whole step, in order


@dataclass
class Step:
    """The rows of one forward over one pool. Built once a step; every layer reads it."""

    pool: KVPool
    rows: tuple[Row, ...]
    backend: Backend
    checked: tuple[int, ...] = ()
    """Rows whose new keys and values are checked."""
    finite: torch.Tensor | None = None
    """Set by the forward if rows are checked: one flag for each of them, on the device."""
    mass: torch.Tensor | None = None
    """[rows] Set by the backend if some row is fast: the estimated share of attention mass that its selected
    blocks hold, mean over layers with summaries and their KV heads. 1 for slow rows. On the device."""
    live: torch.Tensor | None = None
    """[tokens] False for padding, whose keys and values are not checked; None without padding."""
    ends: tuple[int, ...] | None = None
    """How many of each row's last tokens have their last hidden state read; None for all."""

    @cached_property
    def metadata(self) -> Any:
        """The backend's metadata for this step, prepared when the first layer needs it.

        CUDA graph capture assigns it instead, over buffers that stay in place.
        """
        return self.backend.prepare(self)

    @cached_property
    def cumulative_lengths(self) -> list[int]:
        """Row i's tokens are `cumulative_lengths[i] : cumulative_lengths[i + 1]` of the flattened run."""
        total = [0]
        for row in self.rows:
            total.append(total[-1] + row.queries)
        return total

    @cached_property
    def with_policy(self) -> list[int]:
        """The chunks that have a policy; a single query always reads everything."""
        return [i for i, row in enumerate(self.rows) if row.policy is not None and row.queries > 1]

    @cached_property
    def picks(self) -> list[Picks | None]:
        """The blocks that each fast row reads; None for rows that read everything."""
        return [row.picks(self.pool.block_size) for row in self.rows]

    @cached_property
    def positions(self) -> list[int]:
        """The position of every new token."""
        flat: list[int] = []
        for row in self.rows:
            slots = range(row.length) if row.positions is None else row.positions
            flat.extend(slots[row.context : row.length])
        return flat

    @cached_property
    def tail(self) -> Tail | None:
        """What the last layer must compute beside keys and values; None for everything."""
        selects = any(row.policy or row.fast or row.evidence or row.watch for row in self.rows)
        if self.ends is None or selects or sum(self.ends) == self.cumulative_lengths[-1]:
            return None
        rows: list[Row] = []
        tokens: list[int] = []
        for row, read, end in zip(self.rows, self.ends, self.cumulative_lengths[1:], strict=True):
            if read:
                rows.append(row._replace(context=row.length - read, queries=read))
                tokens.extend(range(end - read, end))
        index = torch.tensor(tokens, dtype=torch.long, device=self.pool.device)
        return Tail(Step(self.pool, tuple(rows), self.backend), index)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Store the new keys and values of a layer that nothing attends to. False if the backend cannot."""
        if not self.backend.store(self, layer, key, value):
            return False
        self.check(layer, key, value)
        return True

    def add_mass(self, row: int, mass: torch.Tensor) -> None:
        """Add the mass that a fast row's selected blocks hold in one layer with summaries."""
        self.start_mass()[row] += mass / len(self.pool.summarized)

    def start_mass(self) -> torch.Tensor:
        """The masses so far: 1 for slow rows, and for fast rows 0 at first."""
        if self.mass is None:
            slow = [picks is None for picks in self.picks]
            self.mass = torch.tensor(slow, dtype=torch.float32, device=self.pool.device)
        return self.mass

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        self.check(layer, key, value)
        out = self.backend.attend(self, layer, query, key, value, call)
        self.watch(layer, query, call)
        return out

    def watch(self, layer: int, query: torch.Tensor, call: AttentionCall) -> None:
        """Add to the evidence of rows that are watched, once their keys are written."""
        if not self.pool.stores[layer].summarized:
            return
        for start, row in zip(self.cumulative_lengths, self.rows, strict=False):
            slots = row.watch.within(row.context, row.length) if row.watch is not None else range(0)
            if row.watch is None or not slots:
                continue
            own = query[start + slots.start - row.context : start + slots.stop - row.context]
            runs = self.pool.runs(row.table(self.pool.group_of[layer]), 0, slots.stop)
            key, _ = self.pool.gather(layer, runs)
            size = self.pool.block_size
            shares = highest_shares(own, slots.start, key, size, call.scale, call.softcap)
            row.watch.add(self.pool.summarized.index(layer), shares, size)

    def check(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """In the last layer, set `finite`. A sum is finite if its terms are, and costs one pass.

        A token reads its own key and value in every layer. So a NaN in an earlier layer stays in its hidden
        state up to the last layer, and one check covers all layers.
        """
        if not self.checked or layer != len(self.pool.layers) - 1:
            return
        starts = self.cumulative_lengths
        if self.live is not None:
            key, value = (torch.where(self.live[:, None, None], new, 0) for new in (key, value))
        sums = [
            tensor[starts[row] : starts[row + 1]].sum(dtype=torch.float32)
            for row in self.checked
            for tensor in (key, value)
        ]
        self.finite = torch.stack(sums).isfinite().view(-1, 2).all(dim=1)
