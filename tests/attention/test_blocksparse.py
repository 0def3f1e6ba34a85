"""Block-sparse prefill: which key blocks are read, the attention over them, and the mode in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skim import LLM, RequestOutput, SamplingParams
from skim.attention.backend import Backend, choose_backend
from skim.attention.blocksparse.plain import block_means, block_scores, choose
from skim.attention.blocksparse.policy import BLOCK, Policy, visible_blocks
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.config import PrefillConfig
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Finished
from skim.errors import ConfigError
from skim.llm import CompletionOutput
from skim.memory.store import LayerShape
from tests import paths, tiny
from tests.attention.oracles import attend_listed
from tests.attention.test_backends import gather
from tests.fake import submit
from tests.pools import make_pool, random_tokens

SMALL = Policy(0.5, sinks=1, recent=2, dense=1)
BOOK = paths.BOOK
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
DENSE = PrefillConfig()
ALL = PrefillConfig(prefill_attention="blocksparse", blocksparse_alpha=0)
FEW = PrefillConfig(prefill_attention="blocksparse", blocksparse_alpha=1.0)


# -- the selection rule


@pytest.mark.parametrize(
    "settings", [{"alpha": -0.1}, {"alpha": 1.1}, {"alpha": 0.5, "sample": 3}, {"alpha": 0.5, "recent": 1}]
)
def test_an_invalid_policy_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Policy(**settings)


@pytest.mark.parametrize("prompt", [1, 128, 129, 640, 1000])
@pytest.mark.parametrize("chunk", [128, 384])
def test_the_queries_that_read_everything_do_not_depend_on_chunks(prompt: int, chunk: int) -> None:
    policy = Policy(0.5)
    whole = -(-prompt // BLOCK)
    cut: list[bool] = []
    for context in range(0, prompt, chunk):
        queries = min(chunk, prompt - context)
        first = policy.dense_from(context, queries, prompt)
        cut += [at >= first for at in range(-(-queries // BLOCK))]
    assert cut == [at >= whole - policy.dense for at in range(whole)]


def test_only_query_blocks_at_the_end_of_the_prompt_are_dense() -> None:
    policy = Policy(0.5)
    assert policy.dense_from(0, 100, 1000) == 1
    assert policy.dense_from(700, 68, 1000) == 1
    assert policy.dense_from(700, 69, 1000) == 0  # its last query is in the last two blocks of the prompt
    assert policy.dense_from(1000, 5, 1000) == 0  # generated tokens that are recomputed


@pytest.mark.parametrize(("context", "queries"), [(0, 1), (0, 300), (77, 200), (128, 128), (500, 129)])
def test_visible_blocks_are_those_up_to_the_last_query(context: int, queries: int) -> None:
    ends = [min(start + BLOCK, queries) for start in range(0, queries, BLOCK)]
    assert visible_blocks(context, queries) == sum((context + end - 1) // BLOCK + 1 for end in ends)


@pytest.mark.parametrize("context", [0, 512, 700, 1001])
def test_first_last_and_wanted_blocks_are_kept(context: int) -> None:
    """At any chunk start. A query block reads the key blocks it spans; a single one also the one before."""
    torch.manual_seed(0)
    queries, wanted = 300, 3
    query, key = torch.randn(queries, 2, 16), 0.1 * torch.randn(context + queries, 1, 16)
    query += 1
    key[wanted * BLOCK : (wanted + 1) * BLOCK] += 1
    scores = block_scores(query, block_means(key), context, 0.25)
    kept = choose(scores, context, queries, SMALL, prompt=10_000)
    for at in range(kept.shape[0]):
        first, last = context + at * BLOCK, context + min((at + 1) * BLOCK, queries) - 1
        expected = {0, wanted, *range(max(0, first // BLOCK), last // BLOCK + 1), max(0, last // BLOCK - 1)}
        for head in range(2):
            assert set(kept[at, head].nonzero().flatten().tolist()) == {
                block for block in expected if block <= last // BLOCK
            }


def test_blocks_with_nan_scores_are_read() -> None:
    scores = torch.full((1, 1, 9), 1.0)
    scores[0, 0, :5] = 0.0
    scores[0, 0, 4] = float("nan")
    assert choose(scores, 9 * BLOCK - 1, 1, SMALL, prompt=10_000)[0, 0, 4]


# -- one layer


class Case:
    """Rows over a fragmented pool with random contents."""

    def __init__(self, rows: list[Row], shape: LayerShape, *, scattered: bool = True) -> None:
        torch.manual_seed(len(rows))
        need = [-(-row.length // 16) for row in rows]
        self.pool = make_pool(shape, 16, sum(need), 40 if scattered else sum(need))
        order = torch.randperm(sum(need)).tolist() if scattered else list(range(sum(need)))
        self.rows = []
        for row, count in zip(rows, need, strict=True):
            self.rows.append(row._replace(blocks=order[:count]))
            order = order[count:]
        for row in self.rows:
            runs = self.pool.runs(row.blocks, 0, row.length)
            key, value = random_tokens(self.pool, row.length)
            scored = torch.arange(row.length) // BLOCK % 3  # some blocks score higher than others
            self.pool.write(0, runs, key + 0.3 * scored[:, None, None], value)
        tokens = sum(row.queries for row in rows)
        self.query = torch.randn(2 * shape.kv_heads, tokens, shape.key_dim).transpose(0, 1) + 1
        self.key = torch.randn(tokens, shape.kv_heads, shape.key_dim)
        self.value = torch.randn(tokens, shape.kv_heads, shape.value_dim)

    def attend(self, backend: Backend, call: AttentionCall, *, dense: bool = False) -> torch.Tensor:
        rows = tuple(row._replace(policy=None) if dense else row for row in self.rows)
        return Step(self.pool, rows, backend).attend(0, self.query, self.key, self.value, call)

    def expected(self, index: int, call: AttentionCall) -> torch.Tensor:
        """Reference in float64: a softmax over the keys of the chosen blocks."""
        row = self.rows[index]
        start = sum(one.queries for one in self.rows[:index])
        query = self.query[start : start + row.queries].double()
        key, value = (t.double().transpose(0, 1) for t in gather(self.pool, row, row.length))
        assert row.policy is not None
        scores = block_scores(query, block_means(key), row.context, call.scale)
        kept = choose(scores, row.context, row.queries, row.policy, row.prompt)
        queries, slots = torch.arange(row.queries), torch.arange(row.length)
        seen = kept[queries // BLOCK].transpose(0, 1)[:, :, slots // BLOCK]  # [heads, queries, slots]
        seen = seen & (slots <= row.context + queries[:, None])
        return attend_listed(query, key, value, call, seen).float()


def chunk(context: int, queries: int, **settings: Any) -> Row:
    return Row(
        Role.PREFILL, [], context, queries, **{"policy": SMALL, "prompt": context + queries, **settings}
    )


@pytest.mark.parametrize("kind", ["plain", "softcap and sinks", "unequal heads"])
@pytest.mark.parametrize("scattered", [True, False])
def test_a_chunk_reads_its_blocks_and_no_others(kind: str, scattered: bool) -> None:
    shape = LayerShape(2, 16, 8 if kind == "unequal heads" else 16)
    rows = [
        chunk(0, 700),
        chunk(429, 200, prompt=2000),
        chunk(
            512, 256, positions=range(100, 100 + 3 * 768, 3), ascending=True
        ),  # with gaps: key blocks are over slots
    ]
    case = Case(rows, shape, scattered=scattered)
    call = AttentionCall(0.25)
    if kind == "softcap and sinks":
        call = AttentionCall(0.25, softcap=3.0, sinks=torch.randn(4))
    backend = TorchBackend()
    out = case.attend(backend, call)
    start = 0
    for index, row in enumerate(case.rows):
        torch.testing.assert_close(
            out[start : start + row.queries], case.expected(index, call), rtol=1e-4, atol=1e-4
        )
        start += row.queries
    stats = backend.counter.stats()
    assert stats.chunks == {"sparse": 3}
    assert stats.visible == 4 * sum(visible_blocks(row.context, row.queries) for row in rows)
    assert 0 < stats.read < 0.95 * stats.visible


def test_chunks_that_cannot_be_sparse_read_everything_and_are_counted() -> None:
    shuffled = [*torch.randperm(500).tolist(), *range(500, 600)]
    rows = [
        Row(Role.DECODE, [], 600, 1),
        chunk(600, 1, prompt=2000),  # one token is not a chunk: not counted
        chunk(0, 300),  # all of its blocks are always read
        chunk(500, 100, positions=shuffled, prompt=2000),
        chunk(900, 100),  # the end of the prompt
        chunk(500, 200),
    ]
    case = Case(rows, LayerShape(2, 16, 16))
    for backend in (TorchBackend(), choose_backend(case.pool)):
        call = AttentionCall(0.25)
        out, dense = case.attend(backend, call), case.attend(TorchBackend(), call, dense=True)
        torch.testing.assert_close(out[:-200], dense[:-200], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(out[-200:], dense[-200:], rtol=1e-4, atol=1e-4)
        stats = backend.counter.stats()
        assert stats.chunks == {"short": 1, "order": 1, "end": 1, "sparse": 1}
        windowed = AttentionCall(0.25, window=40)
        out, dense = case.attend(backend, windowed), case.attend(TorchBackend(), windowed, dense=True)
        torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
        again = backend.counter.stats()
        assert again.chunks["window"] == 4
        assert (again.visible, again.read) == (stats.visible, stats.read)


def test_a_threshold_of_zero_reads_everything() -> None:
    everything = replace(SMALL, alpha=0.0)
    case = Case([chunk(429, 300, policy=everything), chunk(0, 500, policy=everything)], LayerShape(2, 16, 16))
    backend, call = TorchBackend(), AttentionCall(0.25)
    out, dense = case.attend(backend, call), case.attend(TorchBackend(), call, dense=True)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
    stats = backend.counter.stats()
    assert stats.chunks["sparse"] == 2
    assert stats.read == stats.visible


# -- the engine


def save(family: str, path: Path) -> Path:
    """Save a tiny model whose context window has more blocks than are always read."""
    torch.manual_seed(0)
    config = tiny.CONFIGS[family]()
    config.max_position_embeddings = 4096
    model = AutoModelForCausalLM.from_config(config).eval().float()
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def load(path: Path, **settings: Any) -> LLM:
    return LLM(path, progress=False, **{"kv_memory": "32M", "max_num_batched_tokens": 512, **settings})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("blocksparse"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with load(path) as llm:
        yield llm


@pytest.fixture(autouse=True)
def clean_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        engine.reset_prefix_cache()
        engine.core.memory.check()
        assert engine.stats().pool.live == 0


def prompt(length: int, start: int = 5000) -> list[int]:
    return [ord(c) % 128 for c in BOOK[start : start + length]]


def ask(llm: LLM, tokens: list[int], prefill: PrefillConfig) -> RequestOutput:
    return llm.generate([tokens], GREEDY, prefill=prefill, use_tqdm=False)[0]


def output_of(handle: RequestHandle) -> RequestOutput:
    """Collect the output of a submitted request."""
    *deltas, finished = handle
    assert isinstance(finished, Finished)
    found = [delta for delta in deltas if isinstance(delta, Delta)]
    tokens = tuple(token for delta in found for token in delta.token_ids)
    logprobs = tuple(one for delta in found for one in delta.logprobs)
    text = "".join(delta.text for delta in found)
    completion = CompletionOutput(0, text, tokens, logprobs, found[-1].finish_reason or "", None)
    return RequestOutput(None, (), (completion,), finished.metrics)


def ids(output: RequestOutput) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)


def logprobs(output: RequestOutput) -> list[float]:
    found = output.outputs[0].logprobs
    assert found is not None
    return [one.logprob for one in found]


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert ids(one) == ids(other)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def counted(
    llm: LLM, tokens: list[int], prefill: PrefillConfig
) -> tuple[RequestOutput, int, int, dict[str, int]]:
    """The reply and its counts: visible blocks, read blocks, chunks by kind."""
    before = llm.stats().attention
    output = ask(llm, tokens, prefill)
    after = llm.stats().attention
    chunks = dict(after.chunks - before.chunks)
    return output, after.visible - before.visible, after.read - before.read, chunks


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_reading_all_blocks_is_dense(family: str, tmp_path: Path) -> None:
    with load(save(family, tmp_path)) as llm:
        tokens = prompt(1500)
        dense, visible, _, _ = counted(llm, tokens, DENSE)
        assert visible == 0
        everything, visible, read, chunks = counted(llm, tokens, ALL)
        assert everything.metrics.cached_tokens == 0
    assert_same(everything, dense)
    assert read == visible
    if family != "mistral":  # all of its layers have sliding windows
        assert chunks["sparse"] > 0
        assert visible > 0


def test_a_short_prompt_is_exact(llm: LLM) -> None:
    tokens = prompt(6 * BLOCK)
    dense = ask(llm, tokens, DENSE)
    few, visible, read, chunks = counted(llm, tokens, FEW)
    assert_same(few, dense)
    assert visible == read > 0
    assert "sparse" not in chunks


def test_a_higher_threshold_reads_fewer_blocks(llm: LLM) -> None:
    tokens = prompt(2500)
    shares = []
    for alpha in (0.0, 0.5, 0.9, 1.0):
        _, visible, read, _ = counted(llm, tokens, replace(FEW, blocksparse_alpha=alpha))
        shares.append(read / visible)
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.7
    dense, few = ask(llm, tokens, DENSE), ask(llm, tokens, FEW)
    assert logprobs(few) != pytest.approx(logprobs(dense), abs=1e-4)


@pytest.mark.parametrize("length", [2048, 2500])
def test_chunks_and_one_forward_give_the_same_result(path: Path, length: int) -> None:
    found = []
    for budget in (4096, 128, 256, 333, 640, 1111):
        with load(path, max_num_batched_tokens=budget) as llm:
            found.append(counted(llm, prompt(length), replace(FEW, blocksparse_alpha=0.8)))
    for output, visible, read, _ in found[1:]:
        assert_same(output, found[0][0])
        assert (visible, read) == (found[0][1], found[0][2])


@pytest.mark.parametrize("budget", [100, 255])
def test_small_chunks_may_be_cut_inside_query_blocks(path: Path, budget: int) -> None:
    """They read other blocks than one forward does. If all blocks are read, the results are equal."""
    tokens = prompt(1700)
    with load(path, max_num_batched_tokens=budget) as llm:
        assert_same(ask(llm, tokens, ALL), ask(llm, tokens, DENSE))
        _, visible, read, chunks = counted(llm, tokens, FEW)
    assert chunks["sparse"] > 0
    assert 0.3 < read / visible < 1


def test_prefixes_are_shared_only_under_the_same_policy(llm: LLM) -> None:
    tokens, other = prompt(2000), replace(FEW, blocksparse_alpha=0.75)
    dense = ask(llm, tokens, DENSE)
    few = ask(llm, tokens, FEW)
    assert few.metrics.cached_tokens == 0
    assert ask(llm, tokens, other).metrics.cached_tokens == 0
    again = ask(llm, tokens, FEW)
    assert again.metrics.cached_tokens == 1920  # whole 128-slot blocks
    assert_same(again, few)
    assert_same(ask(llm, tokens, DENSE), dense)
    longer = ask(llm, [*tokens, *prompt(700, start=9000)], FEW)
    assert longer.metrics.cached_tokens == 1920
    llm.engine.reset_prefix_cache()
    ask(llm, tokens, FEW)
    assert ask(llm, tokens, DENSE).metrics.cached_tokens == 0


def test_a_chunk_after_a_cached_prefix_is_sparse_too(llm: LLM) -> None:
    begin, tokens = prompt(1400), prompt(2600)
    ask(llm, begin, ALL)
    after, _, _, chunks = counted(llm, tokens, ALL)
    assert after.metrics.cached_tokens == 1280
    assert chunks["sparse"] > 0
    assert_same(after, ask(llm, tokens, DENSE))


def test_skipped_spans_and_chosen_blocks_can_be_combined(llm: LLM) -> None:
    skim = replace(DENSE, sparse_prefill="always", scorer="lexical", keep_ratio=0.6, prefill_block_size=16)
    tokens = prompt(3000)
    dense = ask(llm, tokens, skim)
    assert dense.plan is not None
    assert dense.plan.first_gap < 3000
    mode = {"prefill_attention": "blocksparse", "blocksparse_alpha": 0}
    everything, _, _, chunks = counted(llm, tokens, replace(skim, **mode))
    assert everything.metrics.cached_tokens == 0
    assert everything.metrics.kept_tokens == dense.metrics.kept_tokens < 2100
    assert chunks["sparse"] > 0
    assert "order" not in chunks
    assert_same(everything, dense)
    _, visible, read, _ = counted(llm, tokens, replace(skim, **mode | {"blocksparse_alpha": 1.0}))
    assert read < visible


def test_a_follow_up_builds_on_blocks_read_under_the_same_policy(llm: LLM) -> None:
    skim = replace(FEW, sparse_prefill="always", scorer="lexical", keep_ratio=0.5, prefill_block_size=16)
    tokens = prompt(2000)
    further = [*tokens, *prompt(200, start=30_000)]
    ask(llm, tokens, replace(skim, prefill_attention="dense"))
    assert ask(llm, further, skim).metrics.follow_up is None  # nothing was read under this policy
    llm.engine.reset_prefix_cache()
    ask(llm, tokens, skim)
    output, _, _, chunks = counted(llm, [*tokens, *prompt(200, start=60_000)], skim)
    assert (output.metrics.follow_up or "").startswith("backfill")
    assert output.metrics.cached_tokens > 0
    assert chunks["order"] > 0


@pytest.mark.parametrize("budget", [300, 512, 8192])
def test_rows_in_a_batch_do_not_change_each_other(path: Path, budget: int) -> None:
    prompts = [prompt(5), prompt(2000), prompt(1300, start=20_000), prompt(1900, start=40_000)]
    configs = [FEW, FEW, DENSE, replace(FEW, blocksparse_alpha=0.9)]
    with load(path, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        alone = [ask(llm, one, config) for one, config in zip(prompts, configs, strict=True)]
        handles = [
            submit(llm.engine, one, GREEDY, prefill=config)
            for one, config in zip(prompts, configs, strict=True)
        ]
        for handle, expected in zip(handles, alone, strict=True):
            assert_same(output_of(handle), expected)


def test_preemption_does_not_change_the_reply(path: Path) -> None:
    """The later of two requests loses its blocks to the earlier one and is recomputed."""
    tokens, params = prompt(1500), replace(GREEDY, max_tokens=60)
    with load(path) as llm:
        block = llm.stats().pool.block_bytes
        alone = llm.generate([tokens], params, prefill=FEW, use_tqdm=False)[0]
    with load(path, kv_memory=str(block * -(-3050 // 16))) as llm:
        long = submit(llm.engine, prompt(1500, start=30_000), replace(GREEDY, max_tokens=200), prefill=DENSE)
        output = output_of(submit(llm.engine, tokens, params, prefill=FEW))
        list(long)
    assert output.metrics.preemptions > 0
    assert_same(output, alone)


def test_several_replies_share_a_prompt(llm: LLM) -> None:
    params = replace(GREEDY, n=3)
    [output] = llm.generate([prompt(1500)], params, prefill=FEW, use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 1
    assert tuple(output.outputs[0].token_ids) == ids(ask(llm, prompt(1500), FEW))


def test_the_mode_is_a_setting_of_the_llm(path: Path) -> None:
    with load(path, prefill_attention="blocksparse", blocksparse_alpha=1.0) as llm:
        llm.generate([prompt(1500)], GREEDY, use_tqdm=False)
        assert llm.stats().attention.chunks["sparse"] > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_attention", "sparse"),
        ("prefill_attention", None),
        ("blocksparse_alpha", -0.1),
        ("blocksparse_alpha", 1.5),
        ("blocksparse_alpha", float("nan")),
        ("blocksparse_alpha", True),
        ("blocksparse_alpha", "high"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*{value!r}"):
        PrefillConfig(**{name: value})
