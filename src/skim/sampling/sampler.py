"""Turns logits into tokens, for all rows of a step at once.

The operations on a row's logits, in vLLM's order:

1. repetition penalty, over prompt and output tokens: `v / r` where v > 0, else `v * r`
2. presence penalty, then frequency penalty, over output tokens
3. logit bias
4. mask of end tokens, until `min_tokens` have been generated, and of tokens that complete a bad word
5. mask of tokens that are not among the allowed ids
6. mask of tokens that the row's grammar does not allow
7. argmax for greedy rows, which end here; division by the temperature for the others
8. min_p, top_k, top_p: each applies to the tokens left by the previous one
9. one draw from the remaining tokens, by (seed, step)

Ties between logits always go to the lower token id. Logprobs are of the raw logits, before all of these.

A step runs only the operations that its rows need. `draw` never blocks: the tokens stay on the device for the
next forward, and one small tensor is copied to the host asynchronously. `read` waits for that copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skim.sampling import filters
from skim.sampling.batch import SamplerRow, SamplingBatch, build_batch, upload
from skim.sampling.grammar import Matcher, forbidden_tokens
from skim.sampling.logprobs import Draw, Sampled, margins_of, pack, report_logprobs, unpack
from skim.sampling.params import SamplingParams
from skim.sampling.penalties import TokenCounts


class Sampler:
    """Chooses the next token of every row, and keeps the token counts that penalties need.

    A row's tokens depend only on its own logits, params and seed: not on other rows, their order, or pauses
    between its steps. Not thread-safe.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.counts = TokenCounts(vocab_size, device)

    def open(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        seed: int,
        eos_token_ids: Collection[int],
        bad_words: tuple[tuple[int, ...], ...] = (),
        matcher: Matcher | None = None,
    ) -> SamplerRow:
        """Begin a sequence. The caller chooses a seed where the params have none, encodes their bad words,
        compiles their grammar, and passes each of n sequences its own seed and matcher."""
        params.check_vocab(self.vocab_size)
        row = SamplerRow(params, seed, bad_words=bad_words, matcher=matcher)
        if params.min_tokens > 0:
            ends = {*eos_token_ids, *params.stop_token_ids}
            row.suppressed = tuple(sorted(token for token in ends if 0 <= token < self.vocab_size))
        if params.penalized:
            row.counts_index = self.counts.take(prompt_token_ids if params.repetition_penalty != 1 else ())
        return row

    def branch(self, row: SamplerRow) -> SamplerRow:
        """A row that continues where another stands, with counts and a matcher of its own."""
        index = row.counts_index
        return replace(
            row,
            counts_index=None if index is None else self.counts.copy(index),
            matcher=None if row.matcher is None else row.matcher.copy(),
        )

    def close(self, row: SamplerRow) -> None:
        """End a sequence and free its counts. Closing twice does nothing."""
        if row.counts_index is not None:
            self.counts.release(row.counts_index)
            row.counts_index = None
        row.matcher = None
        row.closed = True

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """Draw, and wait for the results."""
        return self.read(self.draw(logits, rows))

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draw:
        """Draw one token per row from `logits` ([rows, vocab], any float dtype, not modified).

        On return the tokens are counted and each `row.step` is advanced, so rows can be drawn again at once,
        unless they need the host to read their tokens first (`SamplerRow.needs_tokens`). A row with unusable
        logits or a failed matcher is read back with `finite` False and is not counted; other rows are not
        affected.
        """
        if tuple(logits.shape) != (len(rows), self.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self.vocab_size}], got {list(logits.shape)}")
        if any(row.closed for row in rows):
            raise ValueError("a closed row cannot be sampled; open a new one")
        batch = build_batch(rows, self.vocab_size)
        packed = self.choose(logits, batch)
        for row in rows:
            row.step += 1
        return Draw.of(packed, tuple(rows), batch.most_logprobs)

    def read(self, draw: Draw) -> list[Sampled]:
        """Wait for the results of a draw, and advance the rows' matchers."""
        results = unpack(draw.wait(), draw.rows, draw.most_logprobs)
        for index, (row, result) in enumerate(zip(draw.rows, results, strict=True)):
            row.step -= not result.finite
            if result.finite:
                row.note(result.token_id)
            if row.matcher is not None and row.matcher.error is not None:
                results[index] = replace(result, error=row.matcher.error)
            elif row.matcher is not None and result.finite:
                row.matcher.consume(result.token_id)
        return results

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Choose the tokens and compute their logprobs, packed for the host."""
        on = upload(batch, self.device)

        peak, tokens = logits.max(dim=-1)  # [rows] each; the maximum of a row with a NaN is NaN
        finite = peak.isfinite()
        usable = finite
        margins = margins_of(logits) if batch.margins else None
        if batch.edited:
            edited_tokens, edited_usable, edited_margins = self._choose_edited(logits, batch, on)
            tokens.index_copy_(0, on["edited"], edited_tokens)
            usable = finite.index_copy(0, on["edited"], edited_usable) & finite
            if margins is not None and edited_margins is not None:
                margins.index_copy_(0, on["edited"], edited_margins)
        report = None
        if batch.reported:
            asking = _pick(logits, batch.reported, on["reported"])
            report = report_logprobs(
                asking, _pick(tokens, batch.reported, on["reported"]), batch.most_logprobs
            )

        packed = pack(tokens, finite, usable, margins, report, on.get("reported"))
        if batch.counted:  # last, so a step that fails earlier can be run again
            drawn, counted = (t.index_select(0, on["counted"]) for t in (tokens, usable))
            self.counts.add(on["counts_indices"], drawn, counted)
        return packed

    def _choose_edited(
        self, logits: Tensor, batch: SamplingBatch, on: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(tokens, True where one could be chosen, margins) for the rows that need more than an argmax."""
        work = _pick(logits, batch.edited, on["edited"]).to(torch.float32, copy=True)  # [edited, vocab]
        if batch.penalized:
            penalties = (on[name].float() for name in ("repetition", "presence", "frequency"))
            penalized = self.counts.penalize(
                _pick(work, batch.penalized, on["penalized"]), on["counts_indices"], *penalties
            )
            work = _put(work, batch.penalized, on["penalized"], penalized)
        if batch.bias:
            work.index_put_((on["bias_rows"], on["bias_ids"]), on["bias"].float(), accumulate=True)
        if batch.suppress_ids:
            ruled_out = torch.full((), -torch.inf, device=work.device)
            work.index_put_((on["suppress_rows"], on["suppress_ids"]), ruled_out)
        if batch.allowed:
            held = _pick(work, batch.allowed, on["allowed"])
            masked = torch.full_like(held, -torch.inf)
            at = on["allowed_rows"], on["allowed_ids"]
            work = _put(work, batch.allowed, on["allowed"], masked.index_put_(at, held[at]))
        if batch.matchers:
            forbidden = forbidden_tokens(batch.matchers, self.vocab_size, self.device)
            held = _pick(work, batch.grammar_rows, on["grammar_rows"]).masked_fill_(forbidden, -torch.inf)
            work = _put(work, batch.grammar_rows, on["grammar_rows"], held)

        peak, tokens = work.max(dim=-1)  # [edited] each
        margins = margins_of(work) if batch.margins else None
        if batch.random:
            logits = _pick(work, batch.random, on["random"])
            drawn = self._draw(logits, _pick(peak, batch.random, on["random"]), batch, on)
            tokens = _put(tokens, batch.random, on["random"], drawn)
        return tokens, peak.isfinite(), margins

    def _draw(self, logits: Tensor, peak: Tensor, batch: SamplingBatch, on: dict[str, Tensor]) -> Tensor:
        """Draw one token id per random row; overwrites `logits` [random, vocab]."""
        filters.scale(logits, peak, on["temperature"].float())
        if batch.any_min_p:
            filters.keep_min_p(logits, on["log_min_p"].float())
        if batch.top_k_rows:
            part = _pick(logits, batch.top_k_rows, on["top_k_rows"])
            filters.keep_top_k(part, on["top_k"], on["top_k_mass"], widest=max(batch.top_k))
            logits = _put(logits, batch.top_k_rows, on["top_k_rows"], part)
        if batch.top_p_rows:
            part = _pick(logits, batch.top_p_rows, on["top_p_rows"])
            filters.keep_top_p(part, on["top_p_mass"])
            logits = _put(logits, batch.top_p_rows, on["top_p_rows"], part)
        return filters.draw(logits, on["uniform"])


def _pick(parent: Tensor, positions: list[int], index: Tensor) -> Tensor:
    """The rows of `parent` at `positions`; `parent` itself if those are all rows."""
    return parent if len(positions) == parent.shape[0] else parent.index_select(0, index)


def _put(parent: Tensor, positions: list[int], index: Tensor, part: Tensor) -> Tensor:
    """`parent` with the rows at `positions` replaced; `part` itself if those are all rows."""
    return part if len(positions) == parent.shape[0] else parent.index_copy_(0, index, part)
