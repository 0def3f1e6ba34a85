"""The batched sampler against a reference that handles each row alone and recounts its history each step."""

import math
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skim.errors import RequestError
from skim.sampling import Sampler, SamplerRow, SamplingParams, filters, grammar
from skim.sampling.rng import uniform

CPU = torch.device("cpu")
VOCAB = 48
EOS = (7, 11)


# --- the reference


def reference_edit(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int],
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    edited = logits.astype(np.float32).copy()
    counts = Counter(output)
    for token in range(len(edited)):
        value = float(edited[token])
        if token in counts or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in counts:
            value -= params.presence_penalty
        value -= params.frequency_penalty * counts[token]
        edited[token] = value + (params.logit_bias or {}).get(token, 0.0)
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            edited[token] = -math.inf
    for word in bad_words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(output) >= len(word) - 1:
            edited[word[-1]] = -math.inf
    if params.allowed_token_ids is not None:
        edited[[token for token in range(len(edited)) if token not in params.allowed_token_ids]] = -math.inf
    return edited


def reference_probs(edited: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The filtered, renormalised distribution; ties rank by token id."""
    scaled = (edited.astype(np.float64) - edited.max()) / params.temperature
    probs = np.exp(scaled)
    probs[probs < params.min_p * probs.max()] = 0.0
    order = sorted(range(len(probs)), key=lambda token: (-edited[token], token))
    if params.top_k > 0:
        for token in order[params.top_k :]:
            probs[token] = 0.0
    probs /= probs.sum()
    if params.top_p < 1:
        gathered = 0.0
        kept = []
        for token in order:
            if kept and gathered >= params.top_p:
                break
            kept.append(token)
            gathered += probs[token]
        probs = np.array([p if token in kept else 0.0 for token, p in enumerate(probs)])
    return probs / probs.sum()


def reference_token(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    seed: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> int:
    edited = reference_edit(logits, params, prompt, output, EOS, bad_words)
    if params.temperature == 0:
        return int(edited.argmax())
    sums = reference_probs(edited, params).cumsum()
    return int(np.searchsorted(sums, uniform(seed, len(output)) * sums[-1], side="right"))


def random_params(rng: random.Random) -> SamplingParams:
    maybe = lambda value, other: value if rng.random() < 0.4 else other  # noqa: E731
    bias = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.randrange(4))}
    return SamplingParams(
        temperature=maybe(0.0, rng.uniform(0.3, 2.0)),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        top_k=maybe(rng.randrange(1, VOCAB + 5), rng.choice((0, -1))),
        min_p=maybe(rng.uniform(0.0, 0.3), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        logit_bias=maybe(bias, None),
        logprobs=maybe(rng.randrange(0, 6), None),
        min_tokens=maybe(rng.randrange(1, 10), 0),
        stop_token_ids=maybe([rng.randrange(VOCAB)], ()),
        allowed_token_ids=maybe(rng.sample(range(VOCAB), rng.randrange(12, VOCAB)), None),
    )


def random_words(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Bad words of few different tokens, so that they often begin."""
    words = rng.choice([0, 0, 1, 4])
    return tuple(tuple(rng.randrange(6) for _ in range(rng.randrange(1, 4))) for _ in range(words))


def draw_logits(generator: torch.Generator, rows: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=generator) * 3


def open_row(
    sampler: Sampler,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    seed: int = 0,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplerRow:
    return sampler.open(params, prompt, seed=seed, eos_token_ids=EOS, bad_words=bad_words)


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """At every draw, the set of tokens that each random row may draw."""
    seen: list[set[int]] = []
    draw = filters.draw

    def spy(logits: Tensor, u: Tensor) -> Tensor:
        seen[:] = [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]
        return draw(logits, u)

    monkeypatch.setattr(filters, "draw", spy)
    return seen


# --- against the reference


@pytest.mark.parametrize("case", range(12))
def test_mixed_batches_choose_what_the_reference_chooses(case: int) -> None:
    rng, generator = random.Random(case), torch.Generator().manual_seed(case)
    sampler = Sampler(VOCAB, CPU)
    live = []
    for seed in range(7):
        params, prompt = random_params(rng), [rng.randrange(VOCAB) for _ in range(rng.randrange(20))]
        words = random_words(rng)
        live.append((open_row(sampler, params, prompt, seed, words), params, prompt, (seed, words), []))
        live[-1][0].wants_margin = rng.random() < 0.5
    for _ in range(25):
        batch = rng.sample(live, rng.randrange(1, len(live) + 1))
        logits = draw_logits(generator, len(batch))
        logits[:, :6] += 3  # the tokens of bad words
        before = logits.clone()
        results = sampler.sample(logits, [row for row, *_ in batch])
        assert torch.equal(logits, before)
        for line, result, (row, params, prompt, (seed, words), output) in zip(
            logits.numpy(), results, batch, strict=True
        ):
            assert result.finite
            assert result.token_id == reference_token(line, params, prompt, output, seed, words)
            check_logprobs(line, params, result.token_id, result.logprob, result.top_logprobs)
            if row.wants_margin:
                *_, second, first = np.sort(reference_edit(line, params, prompt, output, EOS, words))
                assert result.margin == pytest.approx(first - second, abs=1e-4)
            else:
                assert result.margin is None
            output.append(result.token_id)
            assert row.step == len(output)
    for row, _, _, _, output in live:
        if row.counts_index is not None:
            recount = np.bincount(output, minlength=VOCAB)
            assert sampler.counts.output[row.counts_index].tolist() == recount.tolist()


def check_logprobs(
    logits: np.ndarray,
    params: SamplingParams,
    token: int,
    logprob: float | None,
    top: tuple[tuple[int, float], ...] | None,
) -> None:
    if params.logprobs is None:
        assert logprob is None
        assert top is None
        return
    assert logprob is not None
    assert top is not None
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(len(wide)), key=lambda token: (-wide[token], token))[: params.logprobs]
    assert logprob == pytest.approx(expected[token], abs=1e-5)
    assert [best for best, _ in top] == order
    assert [value for _, value in top] == pytest.approx([expected[best] for best in order], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_penalties_equal_a_recount(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    sampler = Sampler(VOCAB, CPU)
    penalize = sampler.counts.penalize
    seen: list[np.ndarray] = []

    def spy(*args: Tensor) -> Tensor:
        result = penalize(*args)
        seen[:] = list(result.numpy().copy())
        return result

    monkeypatch.setattr(sampler.counts, "penalize", spy)
    params = [
        SamplingParams(presence_penalty=p, frequency_penalty=f, repetition_penalty=r, seed=1)
        for p, f, r in [(2, 0, 1), (0, -1.5, 1), (0, 0, 1.8), (-2, 2, 0.3), (0.5, 0.5, 1.3)]
    ]
    prompts = [[rng.randrange(VOCAB) for _ in range(15)] for _ in params]
    rows = [
        open_row(sampler, p, prompt, i) for i, (p, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    outputs: list[list[int]] = [[] for _ in rows]
    for _ in range(60):
        logits = draw_logits(generator, len(rows)).to(dtype)
        results = sampler.sample(logits, rows)
        for i, result in enumerate(results):
            expected = reference_edit(logits[i].float().numpy(), params[i], prompts[i], outputs[i], EOS)
            np.testing.assert_allclose(seen[i], expected, atol=1e-4)
            outputs[i].append(result.token_id)


# --- filters and draws


@pytest.mark.parametrize("case", range(40))
def test_filters_leave_exactly_the_reference_tokens(case: int, support: list[set[int]]) -> None:
    rng = random.Random(100 + case)
    params = SamplingParams(
        temperature=rng.choice((0.5, 1.0, 1.7)),
        top_k=rng.choice((0, 1, 3, 10, VOCAB - 1, VOCAB, 1000)),
        top_p=rng.choice((1.0, 1e-9, 0.3, 0.71, 0.95, 0.999)),
        min_p=rng.choice((0.0, 0.05, 0.2, 1.0)),
    )
    logits = draw_logits(torch.Generator().manual_seed(case), 1)
    if case % 2:
        logits = (logits / 2).round() * 2 + 0.0  # many ties
    sampler = Sampler(VOCAB, CPU)
    sampler.sample(logits, [open_row(sampler, params)])
    expected = reference_probs(logits[0].numpy(), params)
    assert support == [set(np.flatnonzero(expected).tolist())]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.51}, {0, 1, 2}),
        ({"top_p": 1e-12}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"min_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 1.0, "top_p": 0.75}, {0, 1, 2}),
    ],
)
def test_ties_keep_the_lower_ids(
    settings: dict[str, Any], expected: set[int], support: list[set[int]]
) -> None:
    sampler = Sampler(4, CPU)
    sampler.sample(
        torch.zeros(1, 4), [sampler.open(SamplingParams(**settings), (), seed=0, eos_token_ids=())]
    )
    assert support == [expected]


def test_zero_and_minus_zero_are_tied() -> None:
    assert filters.rank(torch.tensor([[-0.0, 0.0, -1.0, -0.0]]), 4).tolist() == [[0, 1, 3, 2]]


def test_a_large_vocabulary_gives_the_same_nucleus_with_or_without_a_full_sort(
    support: list[set[int]],
) -> None:
    wide = 6000
    generator = torch.Generator().manual_seed(0)
    for spread, top_p in ((4.0, 0.9), (0.1, 0.9), (0.0, 0.5)):
        logits = torch.randn(2, wide, generator=generator) * spread
        sampler = Sampler(wide, CPU)
        rows = [open_row(sampler, SamplingParams(top_p=top_p), seed=s) for s in range(2)]
        sampler.sample(logits, rows)
        for got, line in zip(support, logits, strict=True):
            order = line.sort(descending=True, stable=True).indices
            assert got == set(order[: len(got)].tolist())
            mass = line.double().softmax(0)[order].cumsum(0)
            assert mass[len(got) - 1] >= top_p - 1e-6
            assert len(got) == 1 or mass[len(got) - 2] < top_p + 1e-6


def test_top_k_of_one_is_greedy() -> None:
    logits = draw_logits(torch.Generator().manual_seed(1), 20).round()
    sampler = Sampler(VOCAB, CPU)
    one = [open_row(sampler, SamplingParams(top_k=1, temperature=1.5), seed=s) for s in range(20)]
    greedy = [open_row(sampler, SamplingParams(temperature=0)) for _ in range(20)]
    assert sampler.sample(logits, one) == sampler.sample(logits, greedy)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5, 0.5, -3.0]])
    for settings in ({}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}):
        params = SamplingParams(**settings)
        sampler = Sampler(8, CPU)
        rows = [sampler.open(params, (), seed=s, eos_token_ids=()) for s in range(500)]
        drawn: Counter[int] = Counter()
        for _ in range(20):
            drawn.update(r.token_id for r in sampler.sample(logits.expand(500, 8), rows))
        expected = reference_probs(logits[0].numpy(), params) * 10_000
        assert set(drawn) == set(np.flatnonzero(expected).tolist())
        chi_square = sum((drawn[t] - e) ** 2 / e for t, e in enumerate(expected) if e > 0)
        assert chi_square < 30  # p = 1e-4 at seven degrees of freedom


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_draw_at_the_edge_lands_on_a_possible_token(u: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = draw_logits(generator, 64)
    logits[torch.rand(64, VOCAB, generator=generator) < 0.7] = -torch.inf
    logits[:, 20] = 0.0
    tokens = filters.draw(logits, torch.full((64,), u, dtype=torch.float64))
    assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_uniforms_are_spread_and_belong_to_seed_and_step() -> None:
    values = np.array([[uniform(seed, step) for step in range(200)] for seed in range(-50, 50)])
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == values.size
    assert abs(values.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(values[:, :50].T) - np.eye(50)).max() < 0.5
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 1850
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert 0 <= uniform(2**63, 10**7) < 1


# --- seeds and batches


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    rng, generator = random.Random(9), torch.Generator().manual_seed(9)
    kinds = [random_params(rng) for _ in range(8)]
    steps = [
        draw_logits(generator, len(kinds)) for _ in range(30)
    ]  # row i of each step: the logits of sequence i

    def alone(index: int) -> list[object]:
        sampler = Sampler(VOCAB, CPU)
        row = open_row(sampler, kinds[index], [1, 2, 3], seed=index)
        return [sampler.sample(step[index : index + 1], [row])[0].token_id for step in steps]

    sampler = Sampler(VOCAB, CPU)
    rows = [open_row(sampler, params, [1, 2, 3], seed=i) for i, params in enumerate(kinds)]
    together: list[list[object]] = [[] for _ in kinds]
    while any(row.step < len(steps) for row in rows):
        waiting = [i for i, row in enumerate(rows) if row.step < len(steps)]
        batch = rng.sample(waiting, rng.randrange(1, len(waiting) + 1))  # the others count as preempted
        logits = torch.stack([steps[rows[i].step][i] for i in batch])
        for i, result in zip(batch, sampler.sample(logits, [rows[i] for i in batch]), strict=True):
            together[i].append(result.token_id)
    assert together == [alone(i) for i in range(len(kinds))]


def test_a_branch_draws_what_its_row_would_and_leaves_it_alone() -> None:
    rng, generator = random.Random(11), torch.Generator().manual_seed(11)
    for seed in range(40):
        sampler, params = Sampler(VOCAB, CPU), random_params(rng)
        row = open_row(sampler, params, [1, 2, 3], seed=seed)
        before = draw_logits(generator, 5)
        for logits in before:
            sampler.sample(logits[None], [row])
        branch = sampler.branch(row)
        after = draw_logits(generator, 6)
        ahead = [sampler.sample(logits[None], [branch])[0].token_id for logits in after]
        assert (row.step, branch.step) == (5, 11)
        assert [sampler.sample(logits[None], [row])[0].token_id for logits in after] == ahead
        sampler.close(branch)
        sampler.close(row)
        assert sampler.counts.free == sampler.counts.capacity


def test_different_seeds_give_different_tokens() -> None:
    sampler = Sampler(VOCAB, CPU)
    rows = [open_row(sampler, SamplingParams(), seed=s) for s in (1, 2, 1)]
    texts = [[r.token_id for r in sampler.sample(torch.zeros(3, VOCAB), rows)] for _ in range(20)]
    first, second, again = zip(*texts, strict=True)
    assert first == again != second


# --- token counts


def test_opening_and_closing_rows_leaks_no_counts() -> None:
    rng, generator = random.Random(4), torch.Generator().manual_seed(4)
    sampler = Sampler(VOCAB, CPU)
    live: list[tuple[SamplerRow, list[int]]] = []
    for _ in range(500):
        while len(live) < 10 and rng.random() < 0.6:
            live.append((open_row(sampler, random_params(rng), [1, 2], seed=rng.randrange(2**64)), []))
        rng.shuffle(live)
        while live and rng.random() < 0.3:
            row, output = live.pop()
            if row.counts_index is not None:
                counts = sampler.counts.output[row.counts_index].tolist()
                assert counts == np.bincount(output, minlength=VOCAB).tolist()
            sampler.close(row)
            sampler.close(row)
        if live:
            results = sampler.sample(draw_logits(generator, len(live)), [row for row, _ in live])
            for (_, output), result in zip(live, results, strict=True):
                output.append(result.token_id)
        taken = [row.counts_index for row, _ in live if row.counts_index is not None]
        assert len(set(taken)) == len(taken) == sampler.counts.capacity - sampler.counts.free
    assert sampler.counts.capacity <= 16
    for row, _ in live:
        sampler.close(row)
    assert sampler.counts.free == sampler.counts.capacity


def test_nothing_is_allocated_without_penalties() -> None:
    sampler = Sampler(VOCAB, CPU)
    sampler.sample(torch.zeros(1, VOCAB), [open_row(sampler, SamplingParams(min_tokens=1, top_k=3), [1])])
    assert sampler.counts.capacity == 0


def test_misuse_is_refused() -> None:
    sampler = Sampler(VOCAB, CPU)
    row = open_row(sampler, SamplingParams())
    with pytest.raises(ValueError, match=r"\[1, 48\], got \[1, 47\]"):
        sampler.sample(torch.zeros(1, 47), [row])
    with pytest.raises(RequestError, match="token 48"):
        open_row(sampler, SamplingParams(repetition_penalty=2), [3, 48])
    with pytest.raises(RequestError, match="logit_bias names token 99"):
        open_row(sampler, SamplingParams(logit_bias={99: 1}))
    sampler.close(row)
    with pytest.raises(ValueError, match="closed"):
        sampler.sample(torch.zeros(1, VOCAB), [row])
    assert sampler.sample(torch.zeros(0, VOCAB), []) == []


# --- bias, min_tokens, unusable logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    sampler = Sampler(VOCAB, CPU)
    forced = open_row(sampler, SamplingParams(temperature=temperature, logit_bias={3: 100}), seed=1)
    others = {token: -100 for token in range(VOCAB) if token not in (5, 6)}
    forbidden = open_row(sampler, SamplingParams(temperature=temperature, logit_bias=others), seed=2)
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        first, second = sampler.sample(draw_logits(generator, 2), [forced, forbidden])
        assert first.token_id == 3
        assert second.token_id in (5, 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_suppressed_until_min_tokens(temperature: float) -> None:
    sampler = Sampler(VOCAB, CPU)
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=[20])
    row = sampler.open(params, (), seed=0, eos_token_ids=[*EOS, 10_000])
    logits = torch.zeros(1, VOCAB)
    logits[0, [*EOS, 20]] = 50.0
    tokens = [sampler.sample(logits, [row])[0].token_id for _ in range(6)]
    assert not {*tokens[:3]} & {*EOS, 20}
    assert {*tokens[3:]} <= {*EOS, 20}


BAD_ROWS = {
    "nan": lambda line: line.index_fill(0, torch.tensor([9]), math.nan),
    "inf": lambda line: line.index_fill(0, torch.tensor([9]), math.inf),
    "all -inf": lambda line: torch.full_like(line, -math.inf),
    "all nan": lambda line: torch.full_like(line, math.nan),
    "nan at a suppressed token": lambda line: line.index_fill(0, torch.tensor([EOS[0]]), math.nan),
    "inf at a suppressed token": lambda line: line.index_fill(0, torch.tensor([EOS[0]]), math.inf),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_flagged_and_other_rows_are_not_affected(kind: str) -> None:
    rng, generator = random.Random(8), torch.Generator().manual_seed(8)
    shapes = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=5, top_p=0.9, logprobs=3),
        SamplingParams(top_p=0.9, min_p=0.1),
        SamplingParams(repetition_penalty=1.2, presence_penalty=1, logprobs=0),
        SamplingParams(temperature=0, frequency_penalty=1, min_tokens=5, logit_bias={9: 4}),
    ]
    for bad in range(len(shapes)):
        logits = draw_logits(generator, len(shapes))
        spoilt = logits.clone()
        spoilt[bad] = BAD_ROWS[kind](logits[bad])
        clean, other = Sampler(VOCAB, CPU), Sampler(VOCAB, CPU)
        seeds = [rng.randrange(1000) for _ in shapes]
        fine = [open_row(clean, p, [1], seed) for p, seed in zip(shapes, seeds, strict=True)]
        rows = [open_row(other, p, [1], seed) for p, seed in zip(shapes, seeds, strict=True)]
        expected, got = clean.sample(logits, fine), other.sample(spoilt, rows)
        for index, (result, wanted) in enumerate(zip(got, expected, strict=True)):
            if index == bad:
                assert (result.finite, result.token_id, result.logprob) == (False, -1, None)
                assert rows[index].step == 0
                if (counted := rows[index].counts_index) is not None:
                    assert other.counts.output[counted].sum() == 0
            else:
                assert result == wanted


def test_a_row_with_no_token_left_is_flagged() -> None:
    sampler = Sampler(VOCAB, CPU)
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, EOS[0]] = 1.0
    [result] = sampler.sample(logits, [open_row(sampler, SamplingParams(min_tokens=1))])
    assert not result.finite
    assert "no token is left" in (result.error or "")
    assert sampler.sample(logits, [open_row(sampler, SamplingParams())])[0].token_id == EOS[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_never_completed(temperature: float) -> None:
    sampler = Sampler(VOCAB, CPU)
    params = SamplingParams(temperature=temperature, allowed_token_ids=[1, 2, 3], seed=0)
    row = open_row(sampler, params, bad_words=((1, 2), (2, 3, 2), (3, 3)))
    assert row.needs_tokens
    output = [
        sampler.sample(torch.ones(1, VOCAB) * torch.arange(VOCAB) / 9, [row])[0].token_id for _ in range(60)
    ]
    text = ",".join(map(str, output))
    assert set(output) <= {1, 2, 3}
    assert len(set(output)) > 1
    assert not any(word in text for word in ("1,2", "2,3,2", "3,3"))
    assert len(row.recent) == 2
    assert not open_row(sampler, params, bad_words=((1,), (2,))).needs_tokens


def test_masks_that_leave_no_token_are_the_requests_error() -> None:
    sampler = Sampler(VOCAB, CPU)
    rows = [
        open_row(sampler, SamplingParams(allowed_token_ids=[4]), bad_words=((4,),)),
        open_row(sampler, SamplingParams(allowed_token_ids=[4])),
        open_row(sampler, SamplingParams()),
    ]
    logits = draw_logits(torch.Generator().manual_seed(0), 3)
    logits[2, 3] = math.nan
    left, fine, broken = sampler.sample(logits, rows)
    assert (left.finite, fine.finite, broken.finite) == (False, True, False)
    assert "allowed_token_ids, bad_words" in (left.error or "")
    assert (fine.token_id, broken.error) == (4, None)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-5, 1e38, 1e300])
def test_extreme_temperatures_stay_usable(temperature: float) -> None:
    logits = draw_logits(torch.Generator().manual_seed(0), 1)
    logits[0, 5] = -torch.inf
    sampler = Sampler(VOCAB, CPU)
    row = open_row(sampler, SamplingParams(temperature=temperature))
    tokens = {sampler.sample(logits, [row])[0].token_id for _ in range(100)}
    assert 5 not in tokens
    assert len(tokens) > 20 if temperature > 1 else tokens == {int(logits.argmax())}


def test_tied_top_logprobs_are_in_id_order_and_fit_the_vocabulary() -> None:
    sampler = Sampler(4, CPU)
    rows = [sampler.open(SamplingParams(logprobs=n), (), seed=0, eos_token_ids=()) for n in (20, 2)]
    logits = torch.tensor([[0.0, 0.0, 0.0, -torch.inf], [0.0, 1.0, 1.0, 1.0]])
    many, two = sampler.sample(logits, rows)
    assert many.top_logprobs is not None
    assert two.top_logprobs is not None
    assert [token for token, _ in many.top_logprobs] == [0, 1, 2, 3]
    assert many.top_logprobs[3][1] == -math.inf
    assert [token for token, _ in two.top_logprobs] == [1, 2]


# --- operators and synchronization


class Operations(TorchDispatchMode):
    """Records the operators that run, and the largest number of elements each received."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        elements = sum(arg.numel() for arg in args if isinstance(arg, Tensor))
        self.sizes[name] = max(self.sizes.get(name, 0), elements)
        return func(*args, **(kwargs or {}))


SORTS = {"sort", "topk", "argsort"}
EXPONENTIALS = {"_softmax", "_log_softmax", "logsumexp", "exp", "cumsum"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


def operations(settings: Sequence[dict[str, Any]]) -> dict[str, int]:
    sampler = Sampler(VOCAB, CPU)
    rows = [open_row(sampler, SamplingParams(**s), [1, 2], seed=i) for i, s in enumerate(settings)]
    with Operations() as operations:
        sampler.sample(torch.ones(len(rows), VOCAB, dtype=torch.bfloat16), rows)
    return operations.sizes


def test_a_greedy_batch_only_computes_maxima() -> None:
    used = operations([{"temperature": 0}] * 4)
    wide = {name for name, size in used.items() if size >= VOCAB}
    assert wide == {"max"}


@pytest.mark.parametrize(
    ("settings", "absent"),
    [
        ([{}, {"temperature": 0}], SORTS | {"logsumexp", "_log_softmax"}),
        ([{"presence_penalty": 1, "temperature": 0}], SORTS | EXPONENTIALS),
        ([{"logit_bias": {1: 1.0}, "temperature": 0, "min_tokens": 2}], SORTS | EXPONENTIALS),
        ([{"min_p": 0.1}], SORTS | {"logsumexp", "_log_softmax"}),
        ([{"temperature": 0, "logprobs": 0}], SORTS | {"_softmax", "cumsum"}),
    ],
)
def test_a_batch_runs_only_the_operators_its_rows_need(
    settings: list[dict[str, Any]], absent: set[str]
) -> None:
    assert not absent & set(operations(settings))


def test_operators_run_only_on_the_rows_that_need_them() -> None:
    plain = [{"temperature": 0}] * 6
    assert operations([*plain, {"logprobs": 2, "temperature": 0}])["logsumexp"] == VOCAB
    assert operations([*plain, {}])["_softmax"] == VOCAB
    assert operations([*plain, {}, {}, {"top_p": 0.5}])["sort"] == VOCAB


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 3, "top_p": 0.9, "logprobs": 4},
    {"top_p": 0.5},
    {"min_p": 0.2, "logit_bias": {3: 2.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 3},
    {"temperature": 0, "presence_penalty": 1.0, "logprobs": 0},
    {"allowed_token_ids": [3, 5, 8], "temperature": 0.9},
]


@pytest.mark.parametrize("settings", [MIXED, MIXED[:1] * 3, MIXED[2:3] * 2], ids=["mixed", "greedy", "alike"])
def test_drawing_does_not_block_the_host(
    settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    to_host = Tensor.cpu

    def spy(tensor: Tensor) -> Tensor:
        copies.append(tensor.shape)
        return to_host(tensor)

    monkeypatch.setattr(Tensor, "cpu", spy)
    used = operations(settings)
    assert not copies
    assert not WAITS & set(used)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_drawing_does_not_block_and_agrees_with_the_cpu() -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    samplers = Sampler(9000, CPU), Sampler(9000, device)
    rows = [[open_row(s, SamplingParams(**p), [1, 2], i) for i, p in enumerate(MIXED)] for s in samplers]
    for step in range(20):
        logits = draw_logits(generator, len(MIXED), 9000)
        if step == 5:
            logits[3, 0] = math.nan
        on_gpu = logits.to(device)
        expected = samplers[0].sample(logits, rows[0])
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            drawn = samplers[1].draw(on_gpu, rows[1])
            torch.cuda.set_sync_debug_mode("default")
        got = samplers[1].read(drawn)
        waits = [w for w in caught if "called a synchronizing" in str(w.message)]
        assert not waits
        assert [(r.token_id, r.finite) for r in got] == [(r.token_id, r.finite) for r in expected]
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


class Mask:
    """A matcher that allows a random set of tokens."""

    def __init__(self, seed: int, words: int) -> None:
        self.words = words
        generator = torch.Generator().manual_seed(seed)
        self.mask = torch.randint(-(2**31), 2**31, (words,), generator=generator).to(torch.int32)

    def fill(self, mask: Tensor) -> None:
        mask.copy_(self.mask)


def check_forbidden_tokens(device: torch.device) -> None:
    matchers, vocab = [Mask(0, 10), Mask(1, 8), Mask(2, 10)], 300
    forbidden = grammar.forbidden_tokens(matchers, vocab, device)  # type: ignore[arg-type]
    for row, matcher in zip(forbidden.tolist(), matchers, strict=True):
        allowed = {
            32 * i + bit
            for i, word in enumerate(matcher.mask.tolist())
            for bit in range(32)
            if word >> bit & 1
        }
        assert {token for token in range(vocab) if not row[token]} == {t for t in allowed if t < vocab}


def test_tokens_outside_a_matchers_mask_are_forbidden() -> None:
    check_forbidden_tokens(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_tokens_are_forbidden() -> None:
    check_forbidden_tokens(torch.device("cuda"))
