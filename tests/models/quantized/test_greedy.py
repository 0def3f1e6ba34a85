"""The default model writes the same with its codes as with the restored weights."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from skim import LLM, SamplingParams
from skim.measure.book import packaged_text

WRITTEN = 16  # tokens of a reply
TIE = 1e-3  # nats between the two likeliest tokens: rounding errors may change their order


class Reply(NamedTuple):
    tokens: tuple[int, ...]
    leads: list[float]  # of the likeliest token before the next one, in nats


def replies(quantization: str, prompts: list[str]) -> list[Reply]:
    params = SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True, logprobs=2)
    with LLM(kv_memory="200M", device="cpu", quantization=quantization, progress=False) as llm:
        outputs = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    found = []
    for output in outputs:
        assert output.logprobs is not None
        leads = [at.top[0][1] - at.top[1][1] for at in output.logprobs]
        found.append(Reply(tuple(output.token_ids), leads))
    return found


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_greedy_text_is_that_of_the_restored_model(count: int) -> None:
    draw, text = random.Random(0), packaged_text()
    starts = [draw.randrange(len(text) - 2000) for _ in range(count)]
    prompts = [text[start : start + draw.randint(40, 400)] for start in starts]
    coded, restored = replies("auto", prompts), replies("none", prompts)
    differ = 0
    for one, other in zip(coded, restored, strict=True):
        pairs = zip(one.tokens, other.tokens, other.leads, strict=True)
        lead = next((lead for own, expected, lead in pairs if own != expected), None)
        if lead is not None:
            differ += 1
            assert lead < TIE, "the likeliest token was another, and it was no tie"
    assert differ <= -(-count // 16), "too many ties"
