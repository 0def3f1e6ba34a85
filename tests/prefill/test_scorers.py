"""Promises of every scorer, in one matrix, and further promises of those with a model."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from skim.attention import hook
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.policy import Policy
from skim.attention.cpu.torch_backend import TorchBackend
from skim.calibrate.trials import Order, Prompts
from skim.config import ModelConfig
from skim.models.load import load
from skim.models.probe import probe_layers
from skim.prefill.pairs import Kind
from skim.prefill.scorers.attention import AttentionScorer, _standing_out
from skim.prefill.scorers.blend import BlendScorer
from skim.prefill.scorers.entropy import EntropyScorer
from skim.prefill.scorers.full import FullScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring import embedding, features, full_pass, windows
from skim.prefill.scoring.block_scores import _spread, join
from skim.prefill.scoring.calibration import Calibration, default_calibration, shipped
from skim.prefill.scoring.combine import odds
from skim.prefill.scoring.cost import Cost
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.features import Capture, Captures, Feature, Statistic, names_of
from skim.prefill.scoring.full_pass import read_prompt
from skim.prefill.scoring.scorer import SLICE_SECONDS, Scorer, ScoringError, ScoringTask, run_to_completion
from skim.prefill.scoring.statistics import stacked
from skim.prefill.scoring.windows import Batch, WindowStep
from skim.registry import scorers
from tests import paths, tiny
from tests.prefill.small import Model, decode, drive, finish, ordered

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss"]
BLOCK = 16
TEXT = paths.LICENSE
MAX, MEAN, ZMAX, ZMEAN, ZCUBE = Statistic
SOME_HEADS = Calibration(
    layers=(1, 2),
    features=(
        Feature(MAX, 1, 0, 1.0),
        Feature(MAX, 1, 3, -0.3),
        Feature(ZMEAN, 1, 3, 0.5),
        Feature(MEAN, 1, 2, 0.2),
        Feature(MAX, 2, 2, 0.6),
        Feature(ZMAX, 2, 0, 0.4),
        Feature(ZCUBE, 2, 2, -0.5),
    ),
    words=(0.1, 0.2),
)


def attention(module: Any, **options: Any) -> AttentionScorer:
    return AttentionScorer(module, SOME_HEADS, window=64, **options)


def full(module: Any, chunk: int = 40) -> FullScorer:
    return FullScorer(module, probe_layers(module, "tiny"), SOME_HEADS, chunk=chunk)


SMALL: dict[str, Callable[[Any], Scorer]] = {  # small scoring windows and chunks, for short prompts
    "attention": attention,
    "self": lambda module: AttentionScorer(module, default_calibration(4), window=64),
    "blend": lambda module: BlendScorer(
        LexicalScorer(decode), EmbeddingScorer(module), attention(module), Cost(0.5, on_gpu=False)
    ),
    "embedding": EmbeddingScorer,
    "full": full,
    "entropy": lambda module: EntropyScorer(module, window=48),
    "lexical": lambda module: LexicalScorer(decode),
}


def made(name: str) -> Callable[[Any], Scorer]:
    """Make a scorer as the engine does."""
    return lambda module: make_scorers(Model(module), None)(name)


SCORERS = {name: made(name) for name in scorers()} | SMALL
WITH_MODEL = [name for name, declared in scorers().items() if declared.model != "none"]
WINDOWED = [name for name in WITH_MODEL if not scorers()[name].grows]
ALWAYS_ABOVE_0 = ("attention", "full", "entropy", "random")  # others may see nothing in some blocks


@pytest.fixture(scope="module", params=FAMILIES)
def module(request: pytest.FixtureRequest) -> Any:
    return ours(request.param)


@pytest.fixture(params=SCORERS)
def scorer(request: pytest.FixtureRequest, module: Any) -> Scorer:
    return SCORERS[request.param](module)


def ours(family: str) -> Any:
    hook.register()
    model = tiny.build(family)
    model.set_attn_implementation(hook.NAME)
    return model


def prompt(length: int, asking: int = 9, **options: Any) -> ScoringTask:
    """A text of `length` tokens. The question is at the end, followed by two more tokens."""
    tokens = tuple(TEXT[1000 : 1000 + length].encode("latin-1"))
    end = max(1, length - 2)
    return ScoringTask(tokens, (range(max(0, end - asking), end),), BLOCK, **options)


@pytest.mark.parametrize("length", [3, 9, 16, 17, 150, 333])
def test_one_finite_score_for_each_block(scorer: Scorer, length: int) -> None:
    task = prompt(length, asking=min(9, length // 2))
    scores = drive(scorer, task)
    assert len(scores) == task.blocks == -(-length // BLOCK)
    assert all(math.isfinite(score) and score >= 0 for score in scores)


def test_only_candidates_are_scored(scorer: Scorer, request: pytest.FixtureRequest) -> None:
    candidates = (12, 1, 5, 6)
    scores = drive(scorer, prompt(333, candidates=candidates))
    assert all(score == 0.0 for block, score in enumerate(scores) if block not in candidates)
    if request.node.callspec.params["scorer"] in ALWAYS_ABOVE_0:
        assert all(scores[block] > 0 for block in candidates)


def test_without_candidates_all_scores_are_zero(scorer: Scorer) -> None:
    assert drive(scorer, prompt(100, candidates=())) == [0.0] * 7


def test_the_same_task_has_the_same_scores(scorer: Scorer) -> None:
    assert drive(scorer, prompt(333)) == drive(scorer, prompt(333))


@pytest.mark.parametrize(
    "make", [attention, lambda module, **options: EntropyScorer(module, window=48, **options)]
)
def test_scores_do_not_depend_on_the_batch(module: Any, make: Callable[..., Scorer]) -> None:
    alone, slices = finish(make(module, windows_per_batch=1).score(prompt(333)))
    together, fewer = finish(make(module, windows_per_batch=5).score(prompt(333)))
    assert alone == pytest.approx(together, abs=1e-4)
    assert slices > fewer > 0


def test_a_block_has_the_same_score_in_every_scoring_window(module: Any) -> None:
    """The same text in a later scoring window has the same scores: positions restart in each window.

    The first and the last window are excluded: their neighbours differ, and attention near edges counts.
    """
    body = TEXT[1000:1064].encode("latin-1")
    task = ScoringTask((*body * 4, *b"What about it?"), (range(256, 270),), BLOCK)
    scores = drive(attention(module), task)
    assert scores[4:8] == pytest.approx(scores[8:12], abs=1e-5)


def test_attention_near_an_edge_counts_for_both_blocks() -> None:
    """With blocks of 16, token 15 also counts for the next block, with less weight. Token 8 does not."""
    best = torch.zeros(1, 3)
    attention = torch.zeros(1, 1, 16)
    attention[0, 0, 15] = 0.8
    _spread(best, torch.tensor([0]), attention)
    assert best.tolist() == [pytest.approx([0.8, 0.6, 0.0])]
    best = torch.zeros(1, 3)
    attention = torch.zeros(1, 2, 16)
    attention[0, :, 8] = torch.tensor([0.8, 0.2])
    _spread(best, torch.tensor([1, 2]), attention)
    assert best.tolist() == [pytest.approx([0.0, 0.8, 0.2])]


# Scoring windows


def captured(module: Any, batch: Batch, captures: Captures) -> torch.Tensor:
    """The question's attention at the captured heads, layers ascending. [windows, rows, length]"""
    found: dict[int, torch.Tensor] = {}
    windows.run(module, WindowStep(batch, module.device, captures, found.__setitem__))
    return torch.cat([found[layer] for layer in sorted(captures)], dim=1)


def padded(*windows: list[int], asking: int = 0) -> Batch:
    """One batch of scoring windows with different lengths."""
    ends = np.array([len(window) for window in windows])
    return Batch(np.array([[*window, *[7] * (ends.max() - len(window))] for window in windows]), ends, asking)


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("group", [6, 4])
@pytest.mark.parametrize("lengths", [(70,), (70, 41, 12, 70), (30, 30, 30)])
def test_question_attention_equals_the_models_attention(
    family: str, lengths: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with transformers' eager attention, times the lengths of the values, over the same window.

    Other windows change nothing. With fewer rows than question tokens, neighbours share a row.
    """
    monkeypatch.setattr(windows, "MAX_SCORES", 2000)  # computed in parts
    monkeypatch.setattr(features, "MOST_EACH", group)
    rng = random.Random(0)
    some = [[rng.randrange(tiny.VOCAB) for _ in range(length)] for length in lengths]
    captures = {1: Capture(None), 3: Capture(most=(0, 2), mean=(1, 2), each=(0, 3))}
    attention = captured(ours(family), padded(*some, asking=6), captures)
    eager = tiny.build(family)
    for window, rows in zip(some, attention, strict=True):
        cache = DynamicCache()  # without a configuration it keeps all values, of sliding windows too
        with torch.inference_mode():
            found = eager(torch.tensor([window]), output_attentions=True, past_key_values=cache).attentions
        sizes = [cache.layers[layer].values[0].norm(dim=-1) for layer in (1, 3)]  # [kv_heads, length]
        heads = found[1].shape[1] // len(sizes[0])
        first, last = (
            found[layer][0][:, -6:] * size.repeat_interleave(heads, dim=0)[:, None]
            for layer, size in zip((1, 3), sizes, strict=True)
        )  # [heads, question, length]
        each = torch.stack([part.amax(dim=1) for part in last[[0, 3]].split(-(-6 // group), dim=1)], dim=1)
        expected = torch.cat(
            [first.amax(dim=1), last[[0, 2]].amax(dim=1), last[[1, 2]].mean(dim=1), each.flatten(0, 1)]
        )
        assert (rows[:, : len(window)] - expected).abs().max().item() < 1e-4
        assert not rows[:, len(window) :].any()


def test_layers_above_the_last_captured_one_are_not_run(module: Any) -> None:
    ran: list[int] = []
    layers = module.base_model.layers
    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(layers)
    ]
    try:
        captured(module, padded(list(range(40)), asking=5), {0: Capture(None), 2: Capture((1,))})
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2]
    assert len(layers) == 4


def test_a_stopped_forward_does_not_change_the_next_one(module: Any) -> None:
    batch = padded(list(range(30)), asking=5)

    def hidden() -> torch.Tensor:
        return windows.run(module.base_model, WindowStep(batch, module.device)).last_hidden_state

    before = hidden()
    captured(module, batch, {1: Capture(None)})
    assert torch.equal(before, hidden())


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return made


@pytest.mark.parametrize("name", [*WINDOWED, "embedding"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_memory_does_not_grow_with_the_prompt(family: str, name: str) -> None:
    """No tensor of tokens x tokens or tokens x vocabulary; activations of one scoring window at a time."""
    module = ours(family)
    largest = []
    for length in (1200, 3000):
        with Largest() as seen:
            drive(SCORERS[name](module), prompt(length))
        largest.append(seen.numbers)
    assert largest[1] <= 1.5 * largest[0]  # windows of a prompt are equal, so their size varies a little
    assert largest[1] < 3000 * tiny.VOCAB // 10


def test_a_question_must_fit_half_a_scoring_window_of_the_usual_size(module: Any) -> None:
    drive(attention(module), prompt(600, asking=256))  # in windows that are larger for long questions
    with pytest.raises(ScoringError, match=r"257 tokens.* 256, half a scoring window of 512"):
        drive(attention(module), prompt(600, asking=257))
    with pytest.raises(ScoringError, match="0 tokens"):
        drive(attention(module), ScoringTask((1, 2, 3), (), BLOCK))


def test_a_scoring_window_never_exceeds_the_models_positions(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def spy(batch: Batch, *rest: Any) -> Any:
        lengths.extend(batch.ends.tolist())
        return WindowStep(batch, *rest)

    monkeypatch.setattr("skim.prefill.scorers.attention.WindowStep", spy)
    scorer = AttentionScorer(module, SOME_HEADS, window=4096)
    drive(scorer, prompt(2500))
    scattered = ScoringTask(prompt(2500).tokens, (range(2400, 2409),), 1, candidates=tuple(range(0, 2400, 2)))
    drive(scorer, scattered)
    assert len(lengths) > 6
    assert max(lengths) <= module.config.get_text_config().max_position_embeddings == 1024


def test_places_that_are_not_adjacent_are_joined_with_a_separator() -> None:
    prompt = np.arange(100, 120)
    joined = join(np.array([4, 5, 9, 10, 12, 13]), np.array([0, 5, 6]), prompt, np.array([1, 2]))
    assert joined.batch.tokens[0].tolist() == [100, 104, 105, 100, 109, 110, 100, 112, 1, 2]
    assert joined.batch.tokens[1].tolist() == [100, 113, 1, 2, *[100] * 6]
    assert joined.batch.ends.tolist() == [10, 4]
    assert joined.places[0].tolist() == [4, 5, 9, 10, 12]
    assert prompt[joined.places[0]].tolist() == joined.batch.tokens[0][joined.columns[0]].tolist()
    assert joined.counts.tolist() == [5, 1]


def plain_attention_scores(module: Any, task: ScoringTask, window: int) -> list[float]:
    """Reference for the attention scorer with `SOME_HEADS`: one window at a time, token by token."""
    question = task.question_ids.tolist()
    blocks = range(task.blocks) if task.candidates is None else sorted(set(task.candidates))
    size = max(window, 4 * len(question))
    places = [
        place
        for block in blocks
        for place in range(block * BLOCK, min((block + 1) * BLOCK, len(task.tokens)))
        if not task.is_question[place]
    ]
    heads = Capture(most=(0, 1, 2, 3), mean=(0, 1, 2, 3), each=(0, 1, 2, 3))
    best = torch.zeros(2 * (8 + 4 * len(question)), task.blocks)
    pieces = -(-len(places) // size)
    for piece in range(pieces):
        run = places[piece * len(places) // pieces : (piece + 1) * len(places) // pieces]
        tokens, columns, before = [], [], -2
        for place in run:
            if place != before + 1:
                tokens.append(task.tokens[0])
            columns.append(len(tokens))
            tokens.append(task.tokens[place])
            before = place
        batch = padded([*tokens, *question], asking=len(question))
        attention = captured(module, batch, {1: heads, 2: heads})[0]
        smooth = F.avg_pool1d(attention[:, columns], 5, 1, 2, count_include_pad=False)
        for index, place in enumerate(run):
            for shift, weight in ((0, 1.0), (-(BLOCK // 4), 0.75), (BLOCK // 4, 0.75)):
                block = min(max((place + shift) // BLOCK, 0), task.blocks - 1)
                best[:, block] = torch.maximum(best[:, block], weight * smooth[:, index])
    return combined(best.numpy(), sorted({place // BLOCK for place in places}), task.blocks)


def standardised(values: np.ndarray) -> np.ndarray:
    """Deviations in units of the spread; of fewer than 16 values, the missing ones have a spread of 1."""
    count = values.shape[-1]
    variance = values.var(axis=-1, keepdims=True)
    if count < 16:
        variance = (count * variance + 16 - count) / 16
    spread = np.where(np.sqrt(variance) < 1e-4, np.inf, np.sqrt(variance))
    return np.asarray((values - values.mean(axis=-1, keepdims=True)) / spread)


def combined(best: np.ndarray, read: list[int], blocks: int) -> list[float]:
    """The scores of the blocks in `read`, by the weights of `SOME_HEADS`; 0 for the others.

    best: [rows, blocks], of layers 1 and 2: maxima, means and each question token's, of all four heads
    """
    assert SOME_HEADS.features is not None
    logs = np.log(best[:, read].astype(np.float64) + 1e-6).reshape(2, -1, len(read))
    logits = np.zeros(len(read))
    for statistic, layer, head, weight in SOME_HEADS.features:
        own = logs[layer - 1]
        each = standardised(own[8:].reshape(4, -1, len(read))[head])  # [question, blocks]
        found = {
            MAX: own[head],
            MEAN: own[4 + head],
            ZMAX: each.max(axis=0),
            ZMEAN: each.mean(axis=0),
            ZCUBE: np.cbrt((np.maximum(each, 0) ** 3).mean(axis=0)),
        }[statistic]
        logits += weight * standardised(found)
    scores = np.zeros(blocks)
    scores[read] = odds(logits)
    return scores.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(8))
def test_statistics_have_the_order_of_their_names(seed: int) -> None:
    """For any captured heads, each named row is the statistic that its name says, of that head alone."""
    rng = random.Random(seed)
    captures = {
        layer: Capture(*(tuple(sorted(rng.sample(range(6), rng.randrange(4)))) for _ in range(3)))
        for layer in sorted(rng.sample(range(9), 3))
    }
    captures = {layer: capture for layer, capture in captures.items() if capture.heads}
    whole = {
        layer: torch.rand(6 * 5, 40, generator=torch.Generator().manual_seed(layer)) for layer in captures
    }
    names = names_of(captures)
    found = stacked({layer: picked(whole[layer], capture) for layer, capture in captures.items()}, captures)
    assert len(found) == len(names)
    for row, (statistic, layer, head) in zip(found, names, strict=True):
        part = {MAX: "most", MEAN: "mean"}.get(statistic, "each")
        alone = {layer: Capture(**{part: (head,)})}
        expected = stacked({layer: picked(whole[layer], alone[layer])}, alone)
        assert torch.allclose(row, expected[names_of(alone).index((statistic, layer, head))], atol=1e-5)


def picked(rows: torch.Tensor, capture: Capture) -> torch.Tensor:
    """The rows that a capture takes. rows: [6 heads * (a maximum, a mean, three tokens), blocks]"""
    heads = rows.view(6, 5, -1)
    return torch.cat(
        [
            heads[list(capture.most or ()), 0],
            heads[list(capture.mean), 1],
            heads[list(capture.each), 2:].flatten(0, 1),
        ]
    )


def test_a_block_that_does_not_differ_does_not_count() -> None:
    """Rows that are equal for all blocks have no spread. Their rounding errors are not evidence."""
    capture = Capture(most=(0,), mean=(0,), each=(0,))
    rows = torch.full((4, 50), 0.0317)
    assert stacked({0: rows}, {0: capture}).tolist() == [[0.0] * 50] * 5


@pytest.mark.parametrize("seed", range(12))
def test_batched_scoring_windows_equal_single_ones(seed: int) -> None:
    rng = random.Random(seed)
    module = ours(FAMILIES[seed % len(FAMILIES)])
    length = rng.randrange(40, 700)
    start = rng.choice([0, length // 2, length - rng.randrange(1, 20)])
    question = [range(start, min(length, start + rng.randrange(1, 30)))]
    if seed % 2 and start > 9:  # in two places
        question.insert(0, range(rng.randrange(3), 5))
    some = tuple(rng.sample(range(-(-length // BLOCK)), k=rng.randrange(1, -(-length // BLOCK))))
    tokens = tuple(rng.randrange(tiny.VOCAB) for _ in range(length))
    task = ScoringTask(tokens, tuple(question), BLOCK, rng.choice([None, some]))
    expected = plain_attention_scores(module, task, 64)
    assert drive(attention(module, windows_per_batch=1), task) == pytest.approx(expected, abs=1e-5)
    assert drive(attention(module, windows_per_batch=7), task) == pytest.approx(expected, abs=1e-5)


# A full pass


IN_FULL = {1: Capture(most=(0, 3), mean=(1, 2), each=(0, 2)), 2: Capture(None)}


def in_full(module: Any, tokens: list[int], asking: int, **options: Any) -> torch.Tensor:
    layers = probe_layers(module, "tiny")
    found: dict[int, torch.Tensor] = {}
    finish(read_prompt(module, layers, np.array(tokens), asking, IN_FULL, found.__setitem__, **options))
    return torch.cat([found[1], found[2]], dim=1)


@pytest.mark.parametrize("seed", range(15))
def test_a_full_pass_in_chunks_equals_one_long_window(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_pass, "MAX_SCORES", 9000)  # the question is computed in parts
    rng = random.Random(seed)
    monkeypatch.setattr(features, "MOST_EACH", rng.choice([5, 64]))
    module = ours(FAMILIES[seed % len(FAMILIES)])
    tokens = [rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(30, 500))]
    asking = rng.randrange(1, 30)
    expected = captured(module, padded(tokens, asking=asking), IN_FULL)
    found = in_full(module, tokens, asking, chunk=rng.choice([1, 7, 64, 200, 512]))
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max().item() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_pass_owns_the_attention_it_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled layer reuses the memory of its keys as soon as attention returns."""
    module = ours(family)
    tokens = [token % tiny.VOCAB for token in range(7, 300)]
    expected = in_full(module, tokens, 9, chunk=50)
    attend = full_pass.ChunkStep.attend

    def spoil(self: Any, layer: int, query: Any, key: Any, value: Any, call: Any) -> Any:
        out = attend(self, layer, query, key, value, call)
        for used in (query, key, value):
            used.fill_(float("nan"))
        return out

    monkeypatch.setattr(full_pass.ChunkStep, "attend", spoil)
    assert torch.equal(in_full(module, tokens, 9, chunk=50), expected)


@pytest.mark.parametrize("end", ["done", "closed", "failed"])
def test_a_full_pass_frees_its_pool(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[Any]] = []

    class Failing(TorchBackend):
        """Raises in a later chunk if `end` is `failed`."""

        def attend(self, step: Any, *rest: Any) -> Any:
            pools[:] = [weakref.ref(step.pool)]
            if end == "failed" and step.rows[0].context > 100:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().attend(step, *rest)

    monkeypatch.setattr(full_pass, "choose_backend", lambda pool, **_: Failing())
    work = full(ours("llama"), chunk=50).score(prompt(333))
    gc.collect()
    gc.disable()
    try:
        next(work)
        assert pools[0]() is not None
        if end == "closed":
            work.close()
        elif end == "done":
            finish(work)
        else:
            with contextlib.suppress(torch.OutOfMemoryError):
                finish(work)
        assert pools[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(5))
def test_the_full_scorer_equals_the_attention_scorer_with_one_window(seed: int) -> None:
    """For any place of the question. Candidates get the same attention as among all blocks."""
    rng = random.Random(seed)
    module = ours(FAMILIES[seed])
    length = rng.randrange(200, 480)
    start = rng.choice([0, length // 2, length - 12])
    tokens = tuple(rng.randrange(tiny.VOCAB) for _ in range(length))
    task = ScoringTask(tokens, (range(start, start + 12),), BLOCK)
    one_window = AttentionScorer(module, SOME_HEADS, window=length)
    assert drive(full(module), task) == pytest.approx(drive(one_window, task), abs=1e-5)
    some = sorted(rng.sample(range(task.blocks), k=5))
    read = [block for block in some if task.context_counts[block]]
    rows = lambda attention: torch.cat([attention[1], attention[2]])  # noqa: E731
    heads = run_to_completion(full(module).reduced(task.only(some), rows))
    expected = run_to_completion(one_window.reduced(task, rows))
    assert np.abs(heads - expected[:, np.searchsorted(task.context_blocks, read)]).max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_full_pass_reads_the_blocks_that_a_policy_chooses(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    module = ours(family)
    rng = random.Random(0)
    tokens = [rng.randrange(tiny.VOCAB) for _ in range(2000)]
    dense = in_full(module, tokens, 9)
    everything = in_full(module, tokens, 9, policy=Policy(0.0), chunk=256)
    assert (everything - dense).abs().max().item() < 1e-5
    few = {chunk: BlockCounter() for chunk in (128, 256, 2048)}
    found = [in_full(module, tokens, 9, policy=Policy(1.0), counter=c, chunk=n) for n, c in few.items()]
    assert (found[0] - dense).abs().max().item() > 1e-6  # skipped blocks change the result
    for other in found[1:]:  # chunk sizes do not
        assert (other - found[0]).abs().max().item() < 1e-5
    stats = [counter.stats() for counter in few.values()]
    assert all(0 < one.read < one.visible == stats[0].visible for one in stats)
    assert "the drafter's pass" not in caplog.text
    drive(
        full(module, chunk=256),
        ScoringTask(tuple(tokens[:1000]), (range(980, 1000),), BLOCK, policy=Policy(1.0)),
    )
    assert "the drafter's pass over 1001 tokens read" in caplog.text


def test_a_full_pass_yields_after_each_chunk_and_never_reads_more_than_the_drafter_can() -> None:
    module = ours("llama")
    assert finish(full(module, chunk=100).score(prompt(333)))[1] == 4
    drive(full(module), prompt(1022))
    with pytest.raises(ScoringError, match=r"has 1023 tokens.* 1024 positions; use .*attention") as refused:
        drive(full(module), prompt(1023))
    assert refused.value.reason == "scorer_window"
    with pytest.raises(ScoringError, match="the question is empty"):
        drive(full(module), ScoringTask((1, 2, 3), (), BLOCK))


class Waits(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a device, each would be a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["attention", "full", "embedding"])
def test_the_host_waits_at_most_once_at_any_prompt_length(name: str) -> None:
    module = ours("qwen3")
    for length in (200, 1000 if name == "full" else 2000):  # a full pass is limited to the model's positions
        with Waits() as waits:
            drive(SCORERS[name](module), prompt(length))
        assert waits.count <= 1


def test_batches_have_equally_many_windows_of_equal_size() -> None:
    found = [edges.tolist() for edges in windows.cut(100, 9, 5)]
    assert [len(edges) - 1 for edges in found] == [4, 4, 4]
    assert [edge for edges in found for edge in edges[:-1]] == [i * 100 // 12 for i in range(12)]
    assert list(windows.cut(0, 9, 5)) == []


def test_on_a_gpu_the_batch_size_is_limited_by_work_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours("llama")
    assert windows.windows_per_batch(module, 2, 100) == 1  # on the CPU
    monkeypatch.setattr(type(module), "device", torch.device("cuda"))
    takes = windows.bytes_per_token(module)
    monkeypatch.setattr(windows, "gpu_size", lambda _: 64 * 700 * takes)
    assert windows.windows_per_batch(module, 2, 100) == 7
    assert windows.windows_per_batch(module, 2, 1000) == 1
    monkeypatch.setattr(windows, "gpu_size", lambda _: 2**50)
    assert windows.windows_per_batch(module, 2, 100) == (1 << 17) // 100
    layer = sum(one.numel() for one in module.base_model.layers[0].parameters())
    monkeypatch.setattr(windows, "_CUDA_WORK", 1000 * 2.01 * layer / SLICE_SECONDS)
    assert windows.windows_per_batch(module, 2, 100) == 10
    assert windows.windows_per_batch(module, 4, 100) == 5
    assert windows.windows_per_batch(module, 4, 5000) == 1


@pytest.mark.parametrize("name", WITH_MODEL)
def test_non_finite_weights_are_refused_or_not_read(name: str) -> None:
    """A scorer that runs layers notices; one that reads embeddings alone scores as with sound weights."""
    broken = ours("llama")
    scorer = SCORERS[name](broken)
    sound = drive(scorer, prompt(100))
    with torch.no_grad():
        broken.base_model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    message = ""
    try:
        assert drive(scorer, prompt(100)) == sound
    except ScoringError as error:
        message = str(error)
    assert not message or "not finite" in message


def test_heads_that_the_model_does_not_have_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="names layer 4 and head 0"):
        AttentionScorer(module, Calibration(layers=(4,)))


def test_without_a_calibration_the_head_with_the_clearest_peak_counts() -> None:
    loud = [0.5, 0.6, 0.5, 0.7, 0.6, 0.5]
    quiet = [0.01, 0.01, 0.01, 0.01, 0.2, 0.01]
    scores = _standing_out(np.array([loud, loud, loud, quiet]))
    assert ordered(scores.tolist())[0] == 4
    assert scores[4] == pytest.approx(math.sqrt(5))  # of six values, one differs: the most it can deviate


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_entropy_is_computed_from_the_mean_logits(family: str) -> None:
    """Compared with all logits of the transformers model. The last block is partial."""
    task = prompt(45)
    with torch.inference_mode():
        logits = tiny.build(family)(torch.tensor([task.tokens]), use_cache=False).logits[0]
    p = torch.stack([block.mean(dim=0) for block in logits.split(BLOCK)]).softmax(dim=-1)
    expected = -(p * p.clamp_min(1e-9).log()).sum(dim=-1)
    assert drive(EntropyScorer(ours(family)), task) == pytest.approx(expected.tolist(), abs=1e-4)


def test_words_of_similar_meaning_are_found() -> None:
    """Tokens 7 and 3 have the same meaning. The question has one of them, a single block the other."""
    module = ours("llama")
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[7] = table[3] + 0.1 * table[9]
    rng = random.Random(0)
    tokens = [rng.randrange(20, 200) for _ in range(300)]
    tokens[BLOCK * 11 + 5] = 7
    scores = drive(EmbeddingScorer(module), ScoringTask((*tokens, 3, 3), (range(300, 302),), BLOCK))
    assert ordered(scores)[0] == 11


def plain_embedding_scores(scorer: EmbeddingScorer, module: Any, task: ScoringTask) -> list[float]:
    """Reference for the embedding scorer, block by block."""
    rows = module.get_input_embeddings().weight.detach() - scorer._mean
    rows = F.normalize(rows - (rows @ scorer._common)[:, None] * scorer._common, dim=1)
    asked = sorted(set(task.question_ids.tolist()))
    blocks = range(task.blocks) if task.candidates is None else sorted(set(task.candidates))
    own = {}
    for block in blocks:
        places = range(block * BLOCK, min((block + 1) * BLOCK, len(task.tokens)))
        own[block] = [task.tokens[place] for place in places if not task.is_question[place]]
    best = torch.stack(
        [(rows[asked] @ rows[tokens].T).amax(dim=1) for tokens in own.values() if tokens], dim=1
    )
    spread = best.std(dim=1, keepdim=True, correction=0).clamp_min(0.02)
    values = ((best - best.mean(dim=1, keepdim=True)) / spread).clamp_min(0).pow(3).sum(dim=0).tolist()
    found = dict(zip([block for block, tokens in own.items() if tokens], values, strict=True))
    return [found.get(block, 0.0) for block in range(task.blocks)]


@pytest.mark.parametrize("seed", range(6))
def test_scoring_by_unique_tokens_equals_scoring_by_all_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_ROWS", 20)
    monkeypatch.setattr(embedding, "_MATCHES", 500)
    rng = random.Random(seed)
    module = ours("llama")
    length = rng.randrange(60, 700)
    start = rng.choice([0, length // 2, length - 20])
    some = tuple(rng.sample(range(-(-length // BLOCK)), k=3))
    tokens = tuple(rng.randrange(tiny.VOCAB) for _ in range(length))
    question = [range(start, start + 20)]
    if seed % 2 and start > 9:  # in two places
        question.insert(0, range(rng.randrange(3), 5))
    task = ScoringTask(tokens, tuple(question), BLOCK, rng.choice([None, some]))
    scorer = EmbeddingScorer(module)
    expected = plain_embedding_scores(scorer, module, task)
    assert drive(scorer, task) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    monkeypatch.setattr(scorer, "_by_unique_token", scorer._by_vocabulary)  # as on a GPU
    assert drive(scorer, task) == pytest.approx(expected, rel=1e-3, abs=1e-4)


# A real model


@pytest.fixture(scope="module")
def default_model(default_model_dir: Path) -> Any:
    return load(default_model_dir, ModelConfig(device="cpu"))


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.FAR, Kind.NEXT, Kind.CODE, Kind.TABLE])
def test_the_default_model_finds_the_evidence(default_model: Any, kind: Kind) -> None:
    """In the best tenth of the blocks, with the shipped calibration, which never saw this pair."""
    calibration = shipped("smollm2-135m")
    assert calibration is not None
    prompt = Prompts(default_model.tokenizer, paths.BOOK, 0).draw(Order(kind, 0, 2000, held_out=True))
    task = ScoringTask(tuple(prompt.tokens.tolist()), (prompt.question,), 32)
    scores = drive(AttentionScorer(default_model.module, calibration), task)
    best = ordered(scores)[: math.ceil(task.blocks / 10)]
    assert {place // 32 for own in prompt.evidence for place in own} <= set(best)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*WITH_MODEL, "embedding"])
def test_a_gpu_gives_the_same_scores(family: str, name: str) -> None:
    on_cpu, on_gpu = ours(family), ours(family).to("cuda")
    task = prompt(333)
    expected = drive(SCORERS[name](on_cpu), task)
    assert drive(SCORERS[name](on_gpu), task) == pytest.approx(expected, rel=1e-2, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["attention", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_host_does_not_wait_for_a_gpu_before_all_work_is_launched(family: str, name: str) -> None:
    """On a CPU, scorers yield once per launch. On a GPU, they also yield while it computes."""

    def make(module: Any) -> Scorer:
        if name == "attention":
            return attention(module, windows_per_batch=5)
        return full(module, chunk=150)

    task = prompt(2000) if name == "attention" else prompt(1000, policy=Policy(0.5))
    launches = finish(make(ours(family)).score(task))[1]
    scorer = make(ours(family).to("cuda", torch.bfloat16))
    expected = drive(scorer, task)
    work = scorer.score(task)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(launches):
            next(work)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launches > 3
    assert finish(work)[0] == pytest.approx(expected, rel=1e-2, abs=1e-3)
