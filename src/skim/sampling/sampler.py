"""Logits to tokens, for all rows of a step at once.

What happens to a row's logits, in this order (vLLM's):

1. repetition penalty, over prompt and output tokens: `v / r` where v > 0, else `v * r`
2. presence penalty, then frequency penalty, over output tokens
3. logit bias
4. end tokens ruled out until `min_tokens` were generated
5. tokens ruled out that the row's grammar does not allow
6. greedy rows end here with an argmax; the others are divided by the temperature
7. min_p, top_k, top_p: each measured on what the ones before it left
8. one draw from what is left, by (seed, step)

Equal logits rank by token id, lower first, everywhere. Logprobs are of the raw logits, before all of this.

A step does only what its rows ask for. `draw` waits for nothing: the tokens lie on the device, where the next
forward can take them up, and one small tensor is on its way to the host. `read` waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skim.sampling import filters
from skim.sampling.batch import SamplerRow, StepPlan, plan_step, upload
from skim.sampling.grammar import Matcher, forbidden_tokens
from skim.sampling.logprobs import Draw, Sampled, pack, report_logprobs, unpack
from skim.sampling.params import SamplingParams
from skim.sampling.penalties import TokenCounts


class Sampler:
    """Chooses the next token of every row, and keeps what that needs to know of the tokens before.

    A row's tokens depend on its own logits, params and seed alone: not on the rows beside it, their order, or
    pauses between its steps. Not safe to use from several threads.
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
        matcher: Matcher | None = None,
    ) -> SamplerRow:
        """Begin a sequence. `seed` and `matcher` are used as they are: the caller resolves None, compiles the
        params' grammar, and gives each of n its own."""
        params.check_vocab(self.vocab_size)
        row = SamplerRow(params, seed, matcher=matcher)
        if params.min_tokens > 0:
            ends = {*eos_token_ids, *params.stop_token_ids}
            row.suppressed = tuple(sorted(token for token in ends if 0 <= token < self.vocab_size))
        if params.penalized:
            row.slot = self.counts.take(prompt_token_ids if params.repetition_penalty != 1 else ())
        return row

    def close(self, row: SamplerRow) -> None:
        """End a sequence; its counts are free for another. Closing twice does nothing."""
        if row.slot is not None:
            self.counts.give_back(row.slot)
            row.slot = None
        row.matcher = None
        row.closed = True

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """Draw, and wait for what was drawn."""
        return self.read(self.draw(logits, rows))

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draw:
        """One token for every row; `logits[i]` ([rows, vocab], any float dtype, left as they are) is
        `rows[i]`'s.

        The tokens are counted and `row.step` has gone up before this returns; rows without a matcher can be
        drawn for again at once. A row whose logits are unusable, or whose matcher has failed, will be read
        with `finite` False, uncounted; its neighbours are not affected.
        """
        if tuple(logits.shape) != (len(rows), self.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self.vocab_size}], got {list(logits.shape)}")
        if any(row.closed for row in rows):
            raise ValueError("a closed row cannot be sampled; open a new one")
        plan = plan_step(rows, self.vocab_size)
        packed = self.choose(logits, plan)
        for row in rows:
            row.step += 1
        return Draw.of(packed, tuple(rows), plan.most_logprobs)

    def read(self, draw: Draw) -> list[Sampled]:
        """What was drawn. Matchers go past their tokens."""
        results = unpack(draw.wait(), [row.params.logprobs for row in draw.rows], draw.most_logprobs)
        for index, (row, result) in enumerate(zip(draw.rows, results, strict=True)):
            row.step -= not result.finite
            if row.matcher is not None and row.matcher.error is not None:
                results[index] = replace(result, error=row.matcher.error)
            elif row.matcher is not None and result.finite:
                row.matcher.consume(result.token_id)
        return results

    def choose(self, logits: Tensor, plan: StepPlan) -> Tensor:
        """The tokens that are drawn and what is reported of them, packed for the host."""
        on = upload(plan, self.device)

        peak, tokens = logits.max(dim=-1)  # [rows] each; a NaN in a row is its maximum
        finite = peak.isfinite()
        if plan.edited:
            edited_tokens, edited_finite = self._choose_edited(logits, plan, on)
            tokens.index_copy_(0, on["edited"], edited_tokens)
            finite.index_copy_(0, on["edited"], edited_finite & finite.index_select(0, on["edited"]))
        report = None
        if plan.reported:
            asking = _pick(logits, plan.reported, on["reported"])
            report = report_logprobs(asking, _pick(tokens, plan.reported, on["reported"]), plan.most_logprobs)

        packed = pack(tokens, finite, report, on.get("reported"))
        if plan.counted:  # last: a step that fails before has counted nothing, and can be run again
            drawn, usable = (t.index_select(0, on["counted"]) for t in (tokens, finite))
            self.counts.add(on["slots"], drawn, usable)
        return packed

    def _choose_edited(self, logits: Tensor, plan: StepPlan, on: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(tokens, whether one could be chosen) of the rows that are more than an argmax."""
        work = _pick(logits, plan.edited, on["edited"]).to(torch.float32, copy=True)  # [edited, vocab]
        if plan.penalized:
            penalties = (on[name].float() for name in ("repetition", "presence", "frequency"))
            penalized = self.counts.penalize(
                _pick(work, plan.penalized, on["penalized"]), on["slots"], *penalties
            )
            work = _put(work, plan.penalized, on["penalized"], penalized)
        if plan.bias:
            work.index_put_((on["bias_rows"], on["bias_ids"]), on["bias"].float(), accumulate=True)
        if plan.suppress_ids:
            ruled_out = torch.full((), -torch.inf, device=work.device)
            work.index_put_((on["suppress_rows"], on["suppress_ids"]), ruled_out)
        if plan.matchers:
            forbidden = forbidden_tokens(plan.matchers, self.vocab_size, self.device)
            held = _pick(work, plan.grammar_rows, on["grammar_rows"]).masked_fill_(forbidden, -torch.inf)
            work = _put(work, plan.grammar_rows, on["grammar_rows"], held)

        peak, tokens = work.max(dim=-1)  # [edited] each
        if plan.random:
            logits = _pick(work, plan.random, on["random"])
            drawn = self._draw(logits, _pick(peak, plan.random, on["random"]), plan, on)
            tokens = _put(tokens, plan.random, on["random"], drawn)
        return tokens, peak.isfinite()

    def _draw(self, logits: Tensor, peak: Tensor, plan: StepPlan, on: dict[str, Tensor]) -> Tensor:
        """One token id for each of the random rows; overwrites `logits` [random, vocab]."""
        filters.scale(logits, peak, on["temperature"].float())
        if plan.any_min_p:
            filters.keep_min_p(logits, on["log_min_p"].float())
        if plan.top_k_rows:
            part = _pick(logits, plan.top_k_rows, on["top_k_rows"])
            filters.keep_top_k(part, on["top_k"], on["top_k_mass"], widest=max(plan.top_k))
            logits = _put(logits, plan.top_k_rows, on["top_k_rows"], part)
        if plan.top_p_rows:
            part = _pick(logits, plan.top_p_rows, on["top_p_rows"])
            filters.keep_top_p(part, on["top_p_mass"])
            logits = _put(logits, plan.top_p_rows, on["top_p_rows"], part)
        return filters.draw(logits, on["uniform"])


def _pick(parent: Tensor, positions: list[int], index: Tensor) -> Tensor:
    """The rows of `parent` at `positions`; `parent` itself when that is all of them."""
    return parent if len(positions) == parent.shape[0] else parent.index_select(0, index)


def _put(parent: Tensor, positions: list[int], index: Tensor, part: Tensor) -> Tensor:
    """`parent` with the rows at `positions` replaced; `part` itself when that is all of them."""
    return part if len(positions) == parent.shape[0] else parent.index_copy_(0, index, part)
