"""The native passes from scores to blocks compute what torch computes, and propagate what is not finite."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from skim.attention.step import AttentionCall
from skim.native.build import NativeUnavailable
from skim.prefill.scoring import block_scores, full_pass, windows
from skim.prefill.scoring.block_scores import BlockScores, Joined
from skim.prefill.scoring.features import Capture
from skim.prefill.scoring.full_pass import QuestionAttention
from skim.prefill.scoring.native_rows import QuestionKernel, question_kernel
from skim.prefill.scoring.scorer import ScoringTask
from skim.prefill.scoring.windows import Batch, question_attention

SEEDS = range(40)


@pytest.fixture(autouse=True, scope="module")
def native() -> QuestionKernel:
    try:
        QuestionKernel()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    found = question_kernel()
    assert found is not None, "it is built and fails its check"
    return found


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "question_kernel", lambda: None)
    monkeypatch.setattr(block_scores, "question_kernel", lambda: None)


def some_heads(draw: random.Random, heads: int) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(range(heads), draw.randint(0, heads))))


def a_capture(draw: random.Random, heads: int) -> Capture:
    found = Capture(*(some_heads(draw, heads) for _ in range(3)))
    if draw.random() < 0.2 or not found.heads:
        return Capture(None)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_equal_those_of_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, random_floats = random.Random(seed), torch.Generator().manual_seed(seed)
    count, key_heads, group = draw.randint(1, 3), draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    heads, length, asked, dim = key_heads * group, draw.randint(9, 90), draw.randint(1, 9), 8
    query, key = (
        3.0 * torch.randn(count, n, length, dim, generator=random_floats) for n in (heads, key_heads)
    )
    weight = torch.rand(count, key_heads, length, generator=random_floats)
    question = torch.tensor([sorted(draw.sample(range(length), asked)) for _ in range(count)])
    hidden = torch.arange(length)[None, None, None] > question[:, None, :, None]
    sinks = torch.randn(heads, generator=random_floats) if draw.random() < 0.5 else None
    call = AttentionCall(0.3, sinks=sinks, softcap=draw.choice([None, 2.0]))
    given = (key, weight, question, hidden, call, a_capture(draw, heads), draw.randint(1, 4))
    bad = draw.random() < 0.3
    if bad:
        query[-1, draw.randrange(heads), question[-1, draw.randrange(asked)], 0] = float("nan")
    monkeypatch.setattr(windows, "MAX_SCORES", draw.choice([1, windows.MAX_SCORES]))
    ours = question_attention(query, *given)
    in_torch(monkeypatch)
    theirs = question_attention(query, *given)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isnan().any(dim=2), theirs.isnan().any(dim=2))
    torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_equal_those_of_torch_bit_for_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    size, tokens, rows = draw.choice([1, 4, 7, 32]), draw.randint(30, 900), draw.randint(1, 5)
    pieces = draw.randint(1, 3)
    counts = np.array([draw.randint(1, tokens // pieces) for _ in range(pieces)])
    chosen = np.array(sorted(draw.sample(range(tokens), int(counts.sum()))))
    length = int(counts.max()) + draw.randint(0, 9)
    columns, places = np.zeros((2, pieces, int(counts.max())), dtype=np.int64)
    for window, own in enumerate(np.split(chosen, np.cumsum(counts)[:-1])):
        columns[window, : len(own)] = sorted(draw.sample(range(length), len(own)))
        places[window, : len(own)] = own
    joined = Joined(Batch(np.zeros((pieces, length)), counts), columns, places, counts)
    task = ScoringTask((1,) * tokens, (range(tokens - 1, tokens),), size)
    attention = torch.rand(pieces, rows, length, generator=torch.Generator().manual_seed(seed))
    place = draw.choice(["none", "read", "padding"])
    if place == "read":
        attention[0, 0, columns[0, 0]] = draw.choice([float("nan"), float("inf")])
    unread = set(range(1, length)) - set(columns[0, : counts[0]].tolist())  # torch reads column 0 as padding
    if place == "padding" and unread:
        attention[0, 0, unread.pop()] = float("nan")

    def scores() -> BlockScores:
        found = BlockScores(task, torch.device("cpu"))
        for _ in range(2):
            found.taker(joined)(3, attention)
        return found

    ours = scores()
    in_torch(monkeypatch)
    theirs = scores()
    assert (
        [bool(one) for one in ours._finite] == [bool(one) for one in theirs._finite] == [place != "read"] * 2
    )
    if place != "read":
        assert torch.equal(ours._best[3], theirs._best[3])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 50, 8, generator=draw) for heads in (6, 2))
    question = torch.tensor([[45, 46, 47]] * 2)
    hidden = torch.arange(50)[None, None, None] > question[:, None, :, None]
    capture = Capture((0, 3), (1, 2), (0, 5))
    given = (query, key, torch.rand(2, 2, 50, generator=draw), question, hidden, AttentionCall(0.3), capture)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(question_attention(*given))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("in_c", [True, False])
def test_a_full_pass_computes_no_more_scores_at_once_than_allowed(
    in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, asked, heads, most = 80, 30, 6, 5000
    if not in_c:
        in_torch(monkeypatch)
    monkeypatch.setattr(full_pass, "MAX_SCORES", most)
    sizes = []
    matmul = torch.matmul

    def watched(*given: torch.Tensor) -> torch.Tensor:
        found = matmul(*given)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch, "matmul", watched)
    taken: list[torch.Tensor] = []
    attention = QuestionAttention(
        {0: Capture(most=(1,), mean=(4,))},
        lambda _, rows: taken.append(rows),
        length,
        asked,
        torch.device("cpu"),
    )
    attention.add(0, 0, torch.randn(length, 2, 8), torch.randn(length, 2, 8))
    attention.attend(0, torch.randn(asked, heads, 8), AttentionCall(0.3))
    assert taken[0].shape == (1, 2, length)
    assert max(sizes) <= most < sum(sizes) if in_c else max(sizes) <= most
