"""The engine on a CUDA device, with attention in Triton. Run with `make test-gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skim import LLM, SamplingParams
from skim.config import PrefillConfig
from skim.models.forwards.compiled import compile_layers
from skim.models.probe import probe_layers
from skim.prefill.scorers.full import FullScorer
from skim.prefill.scoring.calibration import default_calibration
from skim.prefill.scoring.scorer import ScoringTask
from tests import tiny
from tests.prefill.test_scorers import finish

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_family_generates_the_same_as_transformers(family: str, tmp_path: Path) -> None:
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


def texts(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_exact_decode_verifies_drafts_in_graphs(family: str, tmp_path: Path) -> None:
    path = tiny.save(family, tmp_path)
    prompts = [[(7 * i + j * j) % 250 for j in range(n)] for i, n in enumerate((500, 330, 90, 420))]
    common: dict[str, Any] = {"kv_memory": "64M", "dtype": "float32", "device": "cuda", "block_size": 16}
    with LLM(str(path), **common) as llm:
        dense = texts(llm, prompts, 60)
    with LLM(str(path), **common, slow_fast="exact", slow_fast_min_context=1, decode_budget=64) as llm:
        assert texts(llm, prompts, 60) == dense
        assert [texts(llm, [prompt], 60)[0] for prompt in prompts] == dense
        stats = llm.stats()
    assert 0 < stats.decode.accepted < stats.decode.drafted
    assert stats.paths["graph"] > stats.decode.refreshes["verify"] / 8
    assert not stats.paths["verify"]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_graphs_and_in_flight_steps_do_not_change_the_text(family: str, tmp_path: Path) -> None:
    """Layers are compiled in all cases. Only the launch of steps differs."""
    path = tiny.save(family, tmp_path)
    prompts = [[(7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((50, 3, 27, 130, 1))]
    said = []
    for graphs, ahead in ((True, True), (False, True), (False, False)):
        with LLM(str(path), kv_memory="16M", max_num_batched_tokens=64, device="cuda") as llm:
            core = llm.engine.core
            core.overlaps = ahead
            if not graphs:
                core.runner.graphs = None
            said.append(texts(llm, prompts, 40))
            said.append([texts(llm, [prompt], 20)[0] for prompt in prompts[:2]])
            paths = llm.stats().paths
            assert (paths.get("graph", 0) > 40) == graphs, paths
            assert not {"failed", "memory"} & set(paths)
    assert said[0] == said[2] == said[4]
    assert said[1] == said[3] == said[5]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_skimmed_rows_of_models_with_sliding_windows_run_as_graphs(family: str, tmp_path: Path) -> None:
    """Kept tokens keep their positions, so a sliding window has fewer slots than positions."""
    path = tiny.save(family, tmp_path)
    prompts = [[(7 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((500, 20, 300))]
    skim = PrefillConfig(
        sparse_prefill="always",
        scorer="random",
        keep_ratio=0.4,
        head_tokens=16,
        tail_tokens=16,
        min_scored_tokens=64,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    said = []
    for graphs in (True, False):
        with LLM(str(path), kv_memory="16M", device="cuda") as llm:
            if not graphs:
                llm.engine.core.runner.graphs = None
            outputs = llm.generate(prompts, params, prefill=skim, use_tqdm=False)
            said.append([list(output.outputs[0].token_ids) for output in outputs])
            kept = [o.metrics.kept_tokens < o.metrics.prompt_tokens for o in outputs]
            assert kept == [True, False, True]
            paths = llm.stats().paths
        assert (paths.get("graph", 0) > 30) == graphs, paths
        assert "positions" not in paths
    assert said[0] == said[1]


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_mixed_batch_generates_what_each_row_generates_alone(family: str, tmp_path: Path) -> None:
    """Except for ties: if bfloat16 cannot separate the two likeliest tokens, either may be generated."""
    path = tiny.save(family, tmp_path)
    prompts = [[(5 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((90, 3, 41, 17))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(str(path), kv_memory="16M", max_num_batched_tokens=32, device="cuda") as llm:
        together = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.reset_prefix_cache()
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    compared = 0
    for one, other in zip(together, alone, strict=True):
        for place, (ours, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            compared += 1
            if ours != theirs:
                assert other.logprobs is not None
                (_, best), (_, second) = other.logprobs[place].top
                assert best - second < 0.1, (family, place, other.logprobs[place])
                break  # the texts differ after a tie
    assert compared >= 24


def test_a_compiled_drafter_scores_a_full_pass_like_a_plain_one() -> None:
    """Layers 2 and 3 of 4 are captured over several chunks: keys must outlive the memory of their layers."""
    scores = []
    for compiled in (False, True):
        module = tiny.with_our_attention("qwen3").to("cuda")
        layers = probe_layers(module, "tiny")
        if compiled:
            compile_layers(module)
        scorer = FullScorer(module, layers, default_calibration(4), chunk=100)
        task = ScoringTask(tuple((7 * i) % 250 for i in range(400)), (range(388, 400),), 16)
        scores.append(finish(scorer.score(task))[0])
    assert scores[1] == pytest.approx(scores[0], rel=1e-2, abs=1e-3)


def test_compiled_layers_generate_the_same_as_plain_ones(tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    prompts = [[(3 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((90, 3, 41))]
    said = []
    for eager in (False, True):
        with LLM(str(path), kv_memory="16M", dtype="float32", device="cuda", enforce_eager=eager) as llm:
            said.append(texts(llm, prompts, 24))
            assert ("off" in llm.stats().paths) == eager
    assert said[0] == said[1]
