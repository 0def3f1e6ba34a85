"""The native operations for many tokens equal torch's, and a layer's unread outputs are not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim import LLM, SamplingParams
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.glance import Evidence
from skim.attention.step import Role, Row, Step, Tail
from skim.attention.watch import Watch
from skim.memory.store import LayerShape
from skim.models.forwards import many_tokens
from skim.models.forwards.few_tokens import PLAIN, for_few_tokens
from skim.models.forwards.lean import Lean
from skim.models.forwards.many_tokens import ManyTokenOps
from skim.native.build import NativeUnavailable
from tests import tiny
from tests.pools import make_pool


@pytest.fixture(scope="module")
def ops() -> ManyTokenOps:
    try:
        return ManyTokenOps()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@given(
    tokens=st.one_of(st.integers(1, 70), st.sampled_from([500, 1000])),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_they_equal_torchs(ops: ManyTokenOps, tokens: int, heads: int, half: int, seed: int) -> None:
    torch.manual_seed(seed)
    width, dim = 2 * half, 2 * half
    hidden, other = torch.randn(2, tokens, width).unbind()
    weight = torch.randn(width)
    torch.testing.assert_close(ops.norm(hidden, weight, 1e-5), PLAIN.norm(hidden, weight, 1e-5))
    ours, theirs = hidden.clone(), hidden.clone()
    torch.testing.assert_close(
        ops.add_norm(ours, other, weight, 1e-5), PLAIN.add_norm(theirs, other, weight, 1e-5)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ops.gate(hidden), PLAIN.gate(hidden))
    states = torch.randn(tokens, heads + 2, dim)
    cos, sin = torch.randn(2, tokens, dim).unbind()
    expected = PLAIN.rotate(PLAIN.norm_heads(states[:, 1:-1], weight, 1e-5), cos, sin)
    kept = states[:, [0, -1]].clone()
    torch.testing.assert_close(ops.rotate(ops.norm_heads(states[:, 1:-1], weight, 1e-5), cos, sin), expected)
    assert torch.equal(states[:, [0, -1]], kept)


def test_inputs_in_other_layouts_and_with_nan(ops: ManyTokenOps) -> None:
    hidden = torch.randn(60, 48).t()
    weight = torch.randn(60)
    torch.testing.assert_close(ops.norm(hidden, weight, 1e-5), PLAIN.norm(hidden, weight, 1e-5))
    torch.testing.assert_close(ops.gate(hidden), PLAIN.gate(hidden))
    hidden = hidden.contiguous()
    hidden[3, 5] = float("nan")
    normed = ops.norm(hidden, weight, 1e-5)
    assert normed[3].isnan().all()
    assert normed[[0, 2, 4, 47]].isfinite().all()
    assert ops.gate(hidden)[3, 5].isnan()


def test_a_token_has_the_bits_of_the_operations_for_few(ops: ManyTokenOps) -> None:
    hidden, weight = torch.randn(300, 64), torch.randn(64)
    few = for_few_tokens()
    assert few is not PLAIN
    assert torch.equal(ops.norm(hidden, weight, 1e-5)[40:50], few.norm(hidden[40:50], weight, 1e-5))
    assert torch.equal(ops.gate(hidden)[40:50], few.gate(hidden[40:50]))


class Wrong(ManyTokenOps):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return super().gate(both) * 1.01


class Forgetful(ManyTokenOps):
    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return super().norm(hidden, weight, epsilon).nan_to_num()


@pytest.mark.parametrize(("kind", "reason"), [(Wrong, "differ from torch's"), (Forgetful, "loses a NaN")])
def test_wrong_operations_are_not_used(ops: ManyTokenOps, kind: type[ManyTokenOps], reason: str) -> None:
    with pytest.raises(NativeUnavailable, match=reason):
        many_tokens.check(kind())


# -- the tail of a step


def make_step(rows: list[tuple[int, int]], ends: tuple[int, ...] | None) -> Step:
    pool = make_pool(LayerShape(1, 8, 8), 4, 40, 40, torch.float32)
    taken = iter(range(40))
    made = []
    for context, queries in rows:
        blocks = [next(taken) for _ in range(-(-(context + queries) // 4))]
        made.append(Row(Role.PREFILL, blocks, context, queries))
    return Step(pool, tuple(made), TorchBackend(), ends=ends)


def test_a_tail_is_the_end_of_each_row_that_is_read() -> None:
    tail = make_step([(3, 5), (0, 7), (9, 1)], (2, 0, 1)).tail
    assert tail is not None
    assert tail.tokens.tolist() == [3, 4, 12]
    assert [(row.context, row.queries) for row in tail.step.rows] == [(6, 2), (9, 1)]


def test_a_step_that_is_read_as_a_whole_has_no_tail() -> None:
    assert make_step([(3, 5)], None).tail is None
    assert make_step([(3, 1), (4, 1)], (1, 1)).tail is None
    nothing = make_step([(3, 5)], (0,)).tail
    assert nothing is not None
    assert nothing.tokens.tolist() == []


def test_a_step_that_watches_the_end_of_a_prompt_has_no_tail() -> None:
    """All watched queries add to the evidence of the last layer too."""
    step = make_step([(3, 5), (0, 7)], (1, 0))
    watch = Watch(range(4, 8), Evidence(torch.zeros(1, 1, 2)))
    watched = Step(
        step.pool, (step.rows[0]._replace(watch=watch), step.rows[1]), step.backend, ends=step.ends
    )
    assert step.tail is not None
    assert watched.tail is None


def test_a_last_layer_of_tails_samples_as_a_whole_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    prompts = ["a" * 150, "some words, and more of them", "x"]
    tails: list[int] = []
    attend = Lean._end_tail

    def counted(self: Lean, tail: Tail, *rest: Any) -> torch.Tensor:
        tails.append(len(tail.tokens))
        return attend(self, tail, *rest)

    monkeypatch.setattr(Lean, "_end_tail", counted)

    def drawn() -> list[list[float]]:
        with LLM(path, progress=False, kv_memory="8M", device="cpu", max_num_batched_tokens=64) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
        return [[one.logprob for one in output.outputs[0].logprobs] for output in found]

    ours = drawn()
    assert tails, "no last layer computed a tail"
    monkeypatch.setattr(Step, "tail", None)
    for one, other in zip(ours, drawn(), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
