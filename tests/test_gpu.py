"""The engine on a CUDA device: the same code, its attention in Triton. Run with `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skim import LLM, SamplingParams
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    path = tiny.save(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    reference = reference.to("cuda")
    prompts = [list(range(65, 65 + length)) for length in (50, 3, 27)]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(12):
                logits = reference(torch.tensor([tokens], device="cuda")).logits
                tokens.append(int(logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    with LLM(str(path), kv_memory="16M", max_num_batched_tokens=20, dtype="float32", device="cuda") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().pool.live > 0
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_bfloat16_is_the_default_and_stays_finite(tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    with LLM(str(path), kv_memory="16M") as llm:
        assert llm.engine.model.dtype is torch.bfloat16
        assert llm.engine.model.device.type == "cuda"
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
        [first] = llm.generate("some text", params, use_tqdm=False)
        [again] = llm.generate("some text", params, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 20
    assert first.outputs[0].token_ids[0] == again.outputs[0].token_ids[0]
