"""Recorded token ids of 64 requests: a refactoring must not change them.

After a change that is meant to change tokens, record them again with `python -m tests.test_recorded`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from skim import LLM, Grammar, RequestOutput, SamplingParams
from skim.config import DEFAULT_MODEL, PrefillConfig
from skim.models.forwards import lean
from skim.models.forwards.few_tokens import PLAIN
from skim.models.source import prepare
from tests import paths, tiny

FILE = Path(__file__).parent / "recorded.json"
WORDS = paths.BOOK.split()
QUESTIONS = (
    "What is the access code for the Oslo office?",
    "Who speaks to the captain, and about what?",
    "What does the narrator say of the sea?",
    "How many men are in the boat?",
)
NEEDLE = "The access code for the Oslo office is 16979."
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
SKIM = PrefillConfig(
    sparse_prefill="always",
    scorer="lexical",
    keep_ratio=0.3,
    prefill_block_size=32,
    head_tokens=32,
    tail_tokens=32,
    min_scored_tokens=64,
)


def passage(index: int, words: int) -> str:
    """Natural text with a fact in the middle; a different passage for each index."""
    start = 3000 + 5000 * index
    text = WORDS[start : start + words]
    return " ".join([*text[: words // 2], NEEDLE, *text[words // 2 :]])


def conversation(index: int, words: int) -> list[dict[str, Any]]:
    parts = [passage(index, words), QUESTIONS[index % len(QUESTIONS)]]
    return [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]


def bundled(**settings: Any) -> LLM:
    return LLM(
        prepare(DEFAULT_MODEL, progress=False), progress=False, device="cpu", kv_memory="64M", **settings
    )


def small(family: str, folder: Path, window: int = 1024, **settings: Any) -> LLM:
    path = tiny.save(family, folder / family)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": window}))
    return LLM(path, progress=False, device="cpu", **{"kv_memory": "4M", **settings})


def dense(folder: Path) -> Iterator[RequestOutput]:
    params = [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.4),
        replace(GREEDY, frequency_penalty=0.7, min_p=0.1),
    ]
    with bundled() as llm:
        chats = [conversation(index, 40 + 30 * index) for index in range(4)]
        yield from llm.chat(chats, params, use_tqdm=False)
    for family in ("gemma2", "gemma3", "gpt_oss", "mistral"):
        with small(family, folder, max_num_batched_tokens=96) as llm:
            yield from llm.generate(passage(3, 60), SAMPLED, use_tqdm=False)


def skimmed(folder: Path) -> Iterator[RequestOutput]:
    scorers = ("lexical", "blend", "attention", "self", "full", "entropy", "random")
    configs = [replace(SKIM, scorer=scorer) for scorer in scorers]
    configs.append(replace(SKIM, scorer="blend", keep_ratio=None, keep_mass=0.5, neighbour_radius=1))
    with bundled() as llm:
        for index, config in enumerate(configs):
            yield from llm.chat(conversation(index, 260), GREEDY, prefill=config, use_tqdm=False)


def beyond_the_window(folder: Path) -> Iterator[RequestOutput]:
    config = replace(SKIM, keep_ratio=None, keep_tokens=160)
    with bundled(max_model_len=256) as llm:
        for index, scorer in enumerate(["lexical", "blend", "attention", "random"]):
            chosen = replace(config, scorer=scorer)
            yield from llm.chat(conversation(index, 300), GREEDY, prefill=chosen, use_tqdm=False)
    for family in ("llama", "qwen2", "gemma3", "gpt_oss"):
        with small(family, folder, max_model_len=256) as llm:
            yield from llm.chat(conversation(2, 150), SAMPLED, prefill=config, use_tqdm=False)


def follow_up(folder: Path) -> Iterator[RequestOutput]:
    with bundled() as llm:
        for index, kind in enumerate(["backfill", "backfill", "replan", "reuse"]):
            config = replace(SKIM, follow_up=kind, scorer="blend" if index else "lexical")
            said = conversation(index, 220)
            [first] = llm.chat(said, GREEDY, prefill=config, use_tqdm=False)
            yield first
            more = [
                {"role": "assistant", "content": first.outputs[0].text},
                {"role": "user", "content": QUESTIONS[(index + 1) % len(QUESTIONS)]},
            ]
            [second] = llm.chat([*said, *more], GREEDY, prefill=config, use_tqdm=False)
            assert second.metrics.follow_up is not None
            yield second


def block_sparse(folder: Path) -> Iterator[RequestOutput]:
    for family in ("llama", "qwen3", "gemma3", "gpt_oss"):
        with small(family, folder, window=4096, max_num_batched_tokens=384) as llm:
            for alpha in (0.4, 0.95):
                config = PrefillConfig(prefill_attention="blocksparse", blocksparse_alpha=alpha)
                prompt = passage(5, 400)[:1900]
                yield from llm.generate(prompt, GREEDY, prefill=config, use_tqdm=False)
            read = llm.stats().attention
            assert read.chunks["sparse"] > 0
            assert read.read < read.visible


def grammar(folder: Path) -> Iterator[RequestOutput]:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "code": {"type": "integer"}},
        "required": ["name", "code"],
    }
    grammars = [
        Grammar.json_schema(person),
        Grammar.json_schema({"type": "array", "items": {"enum": ["sea", "whale"]}, "minItems": 2}),
        Grammar.json_object(),
        Grammar.lark('start: ("yes" | "no" | "perhaps") " " NUMBER\nNUMBER: /[0-9]{2,4}/'),
    ]
    with bundled() as llm:
        chats = [conversation(index, 40) for index in range(len(grammars))]
        for params in (GREEDY, SAMPLED):
            each = [replace(params, grammar=one, ignore_eos=False, max_tokens=24) for one in grammars]
            yield from llm.chat(chats, each, use_tqdm=False)


def several(folder: Path) -> Iterator[RequestOutput]:
    with bundled() as llm:
        chats = [conversation(index, 50) for index in range(4)]
        yield from llm.chat(chats, [replace(SAMPLED, n=n) for n in (2, 3, 2, 4)], use_tqdm=False)
    for family in ("llama", "mistral", "gemma3", "qwen3"):
        with small(family, folder) as llm:
            yield from llm.generate(passage(6, 40), replace(SAMPLED, n=3), use_tqdm=False)


def preempted(folder: Path) -> Iterator[RequestOutput]:
    params = replace(SAMPLED, max_tokens=40)
    slot = 4 * 2 * 32 * 4  # bytes of four layers
    pools = {
        "llama": {"kv_memory": 26 * 16 * slot},
        "gemma3": {"kv_memory": 78 * 4 * slot, "block_size": 4},  # blocks of half of its layers end
    }
    for family, pool in pools.items():
        with small(family, folder, max_num_seqs=4, **pool) as llm:
            prompts = [passage(index, 18)[:100] for index in range(4)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert sum(output.metrics.preemptions for output in outputs) > 0
            yield from outputs


KINDS: tuple[Callable[[Path], Iterator[RequestOutput]], ...] = (
    dense,
    skimmed,
    beyond_the_window,
    follow_up,
    block_sparse,
    grammar,
    several,
    preempted,
)


def record(kind: Callable[[Path], Iterator[RequestOutput]], folder: Path) -> list[dict[str, Any]]:
    """The compared values of each request: prompt tokens kept, and output tokens.

    Scorers compute in float32, since not every CPU has products in 8 bits.
    """
    with patch.object(lean, "for_ranking", lambda: PLAIN):
        return [
            {"kept": output.metrics.kept_tokens, "tokens": [list(one.token_ids) for one in output.outputs]}
            for output in kind(folder)
        ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_recorded_requests_give_the_same_tokens(
    kind: Callable[[Path], Iterator[RequestOutput]], tmp_path: Path
) -> None:
    assert record(kind, tmp_path) == json.loads(FILE.read_text())[kind.__name__]


def test_there_are_64_recorded_requests() -> None:
    recorded = json.loads(FILE.read_text())
    assert sum(map(len, recorded.values())) == 64
    assert recorded.keys() == {kind.__name__ for kind in KINDS}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        found = {kind.__name__: record(kind, Path(name) / kind.__name__) for kind in KINDS}
    lines = [
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(one)}" for one in requests) + "\n  ]"
        for name, requests in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
