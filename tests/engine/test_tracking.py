"""Progress of requests, as other threads see it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.config import PrefillConfig
from skim.engine.handle import RequestHandle
from skim.engine.tracking import PHASES, Progress, combined
from skim.sampling.params import SamplingParams
from tests.fake import VOCAB, fake_engine, submit


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("queued", 0, 10), "queued"),
        (Progress("scoring", 0, 10), "scoring"),
        (Progress("reading", 4, 10), "reading 40%"),
        (Progress("reading", 999, 1000), "reading 99%"),
        (Progress("reading", 0, 0), "reading 0%"),
        (Progress("generating", 10, 10), "generating"),
    ],
)
def test_progress_in_words(progress: Progress, text: str) -> None:
    assert str(progress) == text


_PROGRESS = st.builds(
    lambda phase, total, share: Progress(phase, int(total * share), total),
    st.sampled_from(PHASES),
    st.integers(1, 1000),
    st.floats(0, 1),
)


@given(st.lists(_PROGRESS, max_size=5))
def test_several_prompts_generate_only_once_all_are_read(each: list[Progress]) -> None:
    found = combined(each)
    phases = {one.phase for one in each}
    assert (found.phase == "generating") == (phases == {"generating"})
    assert (found.phase == "queued") == (phases <= {"queued"})
    assert found.total == sum(one.total for one in each)
    assert 0 <= found.share <= 1


def test_progress_grows_until_a_preemption_and_ends_with_generating() -> None:
    rng = random.Random(5)
    engine = fake_engine(blocks=24, max_num_batched_tokens=16, max_num_seqs=4)
    handles: list[RequestHandle] = []
    for _ in range(12):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randrange(20, 40))]
        params = SamplingParams(max_tokens=30, temperature=0, n=rng.choice((1, 2)))
        handles.append(submit(engine, prompt, params))
    assert all(str(handle.progress) == "queued" for handle in handles)
    seen: dict[int, list[Progress]] = {handle.id: [] for handle in handles}
    while engine.step():
        for handle in handles:
            seen[handle.id].append(handle.progress)
    assert engine.stats().preemptions > 0
    restarts = 0
    for handle in handles:
        shown = seen[handle.id]
        assert shown[-1] == Progress("generating", shown[-1].total, shown[-1].total)
        assert "reading" in {one.phase for one in shown}
        for before, after in itertools.pairwise(shown):
            restarted = before.phase != "queued" and after.phase == "queued"
            restarts += restarted
            assert restarted or after.computed >= before.computed or before.phase == "queued"
    assert restarts <= engine.stats().preemptions
    engine.close()


def test_a_skimmed_prompt_is_scored_and_then_read_in_part() -> None:
    engine = fake_engine(blocks=400, max_num_batched_tokens=16)
    prefill = PrefillConfig(sparse_prefill="always", scorer="random", keep_tokens=100)
    handle = submit(engine, [i % 60 for i in range(400)], SamplingParams(max_tokens=2), prefill=prefill)
    shown = [handle.progress]
    while engine.step():
        shown.append(handle.progress)
    assert shown[0] == Progress("queued", 0, 400)
    assert any(0 < one.share < 1 and one.total < 400 for one in shown)
    assert shown[-1].phase == "generating"
    engine.close()
