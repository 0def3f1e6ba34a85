"""The formulas of `skim bench` against cases computed by hand, and how contenders take turns."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skim.bench import ceiling, decode, ttft, ttft_table
from skim.bench.ceiling import Ceiling, buffer_bytes, last_cache, measure_ceiling, rescale_shares
from skim.bench.decode import Sample
from skim.bench.drive import FirstToken, Phases, Steps
from skim.bench.inputs import book_prompts, random_prompts, several
from skim.bench.turns import Turn, alone, take_turns
from skim.bench.work import Work, kv_bytes, seen_pairs, work_of
from skim.errors import ConfigError
from skim.measure.modes import parse_mode
from skim.measure.report import Figure, Row, plain, timing
from skim.memory.formats import make_stores
from skim.memory.store import LayerShape
from tests import tiny

LAYER = LayerShape(kv_heads=2, key_dim=8, value_dim=4)


def test_pairs_are_those_of_a_causal_mask() -> None:
    draw = random.Random(0)
    for _ in range(200):
        tokens, cached = draw.randrange(0, 30), draw.randrange(0, 30)
        window = draw.choice([None, draw.randrange(1, 40)])
        seen = sum(min(i + 1, window or i + 1) for i in range(cached, cached + tokens))
        assert seen_pairs(tokens, cached, window) == seen


def test_operations_and_bytes_by_hand() -> None:
    work = Work(1000, 50, 4200, query_heads=4, layers=(LAYER, replace(LAYER, window=2)))
    # 10 tokens: 2 FLOPs per body parameter; 2 per head parameter, once; 55 pairs, 19 in the sliding window
    assert work.prefill_flops(10) == 20_000 + 100 + 2 * 4 * (8 + 4) * (55 + 19)
    assert work.prefill_flops(1, cached=9) == 2_000 + 100 + 2 * 4 * (8 + 4) * (10 + 2)
    # a token has 2 * (8 + 4) elements in a layer
    stores = make_stores(work.layers, torch.float16)
    assert kv_bytes(stores, 10, 16) == 24 * 10 * 2 + 24 * 2 * 2
    assert work.step_bytes([10, 10], stores, 16) == 4200 + 2 * (480 + 96)


def test_the_work_of_a_module() -> None:
    module = tiny.build("qwen3")
    work = work_of(module, (LAYER,) * 4)
    body = 4 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96)
    norms = 4 * (2 * 32 + 2 * 64) + 64
    assert (work.body_params, work.head_params) == (body, 64 * 258)
    assert work.weight_bytes == 4 * (body + norms + 64 * 258)  # the embedding table is not read


def test_tied_weights_count_once_and_only_active_experts_count() -> None:
    # 4 layers of width 64 with 4 query heads and 2 key heads of 16: q, k and v, o with their biases
    attention, attention_biases = 64 * 64 + 2 * 64 * 32 + 64 * 64, 64 + 2 * 32 + 64
    router, sinks, norms = 4 * 64, 4, 2 * 64
    expert, expert_biases = 64 * 2 * 96 + 96 * 64, 2 * 96 + 64  # gate and up together, down
    work = work_of(tiny.build("gpt_oss"), (LAYER,) * 4)
    assert (work.experts, work.active) == (4, 2)
    assert work.body_params == 4 * (attention + router + 2 * expert)
    assert work.expert_bytes == 4 * 4 * (expert + expert_biases)
    rest = 4 * (attention + attention_biases + router + 4 + sinks + norms) + 64 + 64 * 258
    assert work.weight_bytes == 4 * rest + 2 * work.expert_bytes


class Listed(torch.nn.Module):
    """Four experts as separate modules beside a shared one; the config's fields are the test's."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=1, **config)
        self.config.get_text_config = lambda: self.config
        self.embed, self.head = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 5, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(4))
        self.shared_experts = torch.nn.Linear(8, 3)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_every_spelling_of_the_expert_count_is_known(spelling: str) -> None:
    work = work_of(Listed(**{spelling: 4, "num_experts_per_tok": 1}), (LAYER,))
    assert (work.experts, work.active, work.expert_bytes) == (4, 1, 4 * (8 * 3 + 3))
    assert work.body_params == 2 * 8 * 3
    assert work.weight_bytes == 4 * (8 * 5 + 2 * (8 * 3 + 3))
    whole = work_of(Listed(), (LAYER,))
    assert (whole.experts, whole.body_params) == (0, 5 * 8 * 3)


def test_rows_read_different_experts_until_all_are_read() -> None:
    work = Work(0, 0, 1000, 1, (LAYER,), experts=4, active=2, expert_bytes=100)
    assert [work.weights_read(rows) for rows in (1, 2, 3, 64)] == [1000, 1200, 1200, 1200]
    stores = make_stores(work.layers, torch.float16)
    assert work.step_bytes([10, 10], stores, 16) == 1200 + 2 * 24 * 10 * 2
    assert Work(0, 0, 1000, 1, (LAYER,)).weights_read(64) == 1000


def sample(seconds: float, **changes: float) -> FirstToken:
    parts = {"queue": 0.1 * seconds, "scoring": 0.3 * seconds, "prefill": 0.6 * seconds, **changes}
    return FirstToken(seconds, 0.5, 100, Phases(**parts, kept=50, cached=0))


def test_the_parts_are_those_of_the_median_run() -> None:
    found = ttft.figures_of([sample(3.0), sample(1.0), sample(2.0, queue=0.0, scoring=1.5, prefill=0.5)])
    assert found["ttft"].value == 2.0
    assert (found["ttft"].low, found["ttft"].high, found["ttft"].n) == (1.0, 3.0, 3)
    assert found["ttft_p99"].value == pytest.approx(2.98)
    assert (found["ttft_p99"].low, found["ttft_p99"].high, found["ttft_p99"].n) == (1.0, 3.0, 3)
    assert [found[name].value for name in ("queue", "scoring", "prefill")] == [0.0, 1.5, 0.5]
    assert (found["scoring"].low, found["scoring"].high) == (pytest.approx(0.3), 1.5)
    assert found["kept"].value == 0.5
    assert (found["kept"].n, found["kept"].better) == (3, "neither")
    even = ttft.figures_of([sample(4.0), sample(1.0), sample(2.0), sample(3.0)])
    assert even["ttft"].value == 2.5
    assert sum(even[name].value for name in ("queue", "scoring", "prefill")) == pytest.approx(2.5)


def test_rates_have_the_range_of_the_repeats() -> None:
    work = Work(1000, 0, 0, query_heads=0, layers=(LAYER,))
    runs = [sample(seconds) for seconds in (1.0, 2.0, 4.0)]  # 50 tokens are 100,000 FLOPs, in 0.6 of the time
    found = ttft.figures_of(runs, (work, Ceiling(flops=1e6, bandwidth=1.0)))
    gflops, share = found["gflops"], found["of_peak"]
    expected = [1e5 / (0.6 * seconds) for seconds in (4.0, 2.0, 1.0)]
    assert (gflops.low, gflops.value, gflops.high) == pytest.approx([one / 1e9 for one in expected])
    assert (share.low, share.value, share.high) == pytest.approx([one / 1e6 for one in expected])
    assert (gflops.n, share.n, share.better) == (3, 3, "higher")


def test_steps_and_their_floor() -> None:
    found = decode.figures_of(
        [Sample(Steps((0.01, 0.02, 0.03), (10, 10)), 5_000), Sample(Steps((0.04,) * 3, (10, 10)), 5_000)], 1e6
    )
    assert found["step"].value == pytest.approx(30.0)
    assert found["throughput"].value == pytest.approx((2 / 0.02 + 2 / 0.04) / 2)
    assert found["floor"].value == pytest.approx(5.0)
    share = found["of_floor"]
    assert (share.low, share.value, share.high) == pytest.approx((5 / 40, (5 / 40 + 5 / 20) / 2, 5 / 20))
    assert share.n == 2
    slowest = found["step_p99"]
    assert (slowest.low, slowest.value, slowest.high) == pytest.approx((29.8, 40.0, 40.0))
    assert (slowest.n, slowest.better) == (2, "lower")


def row(mode: str, context: int, seconds: float | None, state: str = "cold", noise: float = 0.01) -> Row:
    key = {"context": context, "mode": mode, "state": state}
    if seconds is None:
        return Row(key, failed="broke")
    return Row(key, {"ttft": timing([seconds - noise, seconds, seconds + noise])})


def test_the_crossover_is_where_sparse_stays_ahead() -> None:
    modes = [parse_mode("dense"), parse_mode("lexical:0.1"), parse_mode("blend:0.1")]
    times = {1: (1.0, 0.9, 2.0), 2: (2.0, 2.1, 3.0), 4: (4.0, 2.0, 5.0), 8: (8.0, 3.0, 9.0)}
    rows = [row(m.name, c, t) for c, each in times.items() for m, t in zip(modes, each, strict=True)]
    rows += [row("lexical:0.1", 2, 0.1, "warm"), row("dense", 16, None), row("lexical:0.1", 16, 99.0)]
    assert ttft.crossovers(rows, modes) == {"lexical:0.1": 4, "blend:0.1": None}
    assert ttft.crossovers(rows[:6], modes) == {}
    assert ttft.crossovers(rows, modes[1:]) == {}


def test_a_crossover_is_beyond_the_noise() -> None:
    modes = [parse_mode("dense"), parse_mode("lexical:0.1")]

    def found(noise: float) -> int | None:
        times = {1: (1.0, 0.98), 2: (2.0, 1.9), 4: (4.0, 3.0)}
        return ttft.crossovers(
            [
                row(mode.name, context, seconds, noise=noise)
                for context, each in times.items()
                for mode, seconds in zip(modes, each, strict=True)
            ],
            modes,
        )["lexical:0.1"]

    assert [found(noise) for noise in (0.009, 0.04, 0.4, 0.6)] == [1, 2, 4, None]
    once = [
        Row({"context": context, "mode": mode.name, "state": "cold"}, {"ttft": timing([seconds])})
        for context in (1, 2, 4)
        for mode, seconds in zip(modes, (2.0, 1.0), strict=True)
    ]
    assert ttft.crossovers(once, modes) == {}, "the noise of a single run is unknown"


def test_a_table_of_first_tokens_fits_a_terminal_and_has_the_speedup() -> None:
    work = Work(1000, 0, 0, query_heads=0, layers=(LAYER,))
    limit = (work, Ceiling(flops=1e6, bandwidth=1.0))

    def of(mode: str, *seconds: float, model: str = "llama-3.1-8b", state: str = "cold") -> Row:
        key = {"model": model, "context": 131_072, "mode": mode, "state": state}
        return Row(key, ttft.figures_of([sample(one) for one in seconds], limit if state == "cold" else None))

    peer = Row({**of("llama.cpp", 1.0).key}, ttft.figures_of([FirstToken(25.6, 0.02, 100)]))
    other = {"model": "qwen3-8b", "context": 131_072, "state": "cold"}
    rows = [of("dense", 9.0, 10.0, 14.0), of("blend:1000t", 2.0, 2.0, 3.0), peer]
    rows += [of("dense", 0.5, state="warm"), of("blend:1000t", 0.25, state="warm")]
    rows += [
        Row({**other, "mode": "dense"}, failed="out of memory"),
        of("lexical:0.1", 1.0, model="qwen3-8b"),
    ]
    note, head, *lines = ttft_table.listing(rows).splitlines()
    assert max(map(len, (note, head, *lines))) <= 140
    assert note.startswith("times in ms")
    assert head.split("  ")[0] == "model"
    assert lines[0].split() == [
        *("llama-3.1-8b", "131,072", "dense", "cold", "3", "10,000", "(9,000-14,000)", "13,920"),
        *("1,000", "3,000", "6,000", "500", "1.00x", "50%", "2%"),
    ]
    assert [ttft_table.speedup(row, rows) for row in rows if not row.failed] == [
        *(1.0, 5.0, 10 / 25.6, 1.0, 2.0),
        None,  # dense of that model failed
    ]
    assert lines[2].split() == [
        *("llama-3.1-8b", "131,072", "llama.cpp", "cold", "1", "25,600", "25,600", "20.0", "0.39x")
    ]
    assert lines[5].split(maxsplit=4)[4] == "FAILED: out of memory"
    slow = ttft_table.listing([of("dense", 250.0)]).splitlines()
    assert slow[2].split()[:7] == ["131,072", "dense", "cold", "1", "250", "250", "25.0"]
    assert "ttft [s]" in slow[1]
    ttft_table.listing(rows[5:6])  # all rows failed: there is no time to choose a unit by


def test_no_contender_always_follows_the_same_one() -> None:
    """One that follows a long run is a few percent slower, which would pass for a difference."""
    order: list[str] = []

    def turn(name: str) -> Turn[float]:
        def measure(repeat: int) -> Iterator[float]:
            order.append(name)
            yield 1.0

        return Turn([{"mode": name}], measure)

    take_turns([turn(name) for name in "abcd"], 40)
    repeats = ["".join(order[i : i + 4]) for i in range(0, 160, 4)]
    assert all(sorted(repeat) == list("abcd") for repeat in repeats)
    for name in "abcd":
        assert 2 <= sum(repeat.startswith(name) for repeat in repeats) <= 20
        for other in set("abcd") - {name}:
            assert sum(name + other in repeat for repeat in repeats) <= 20


def test_every_turn_is_taken_and_a_failure_affects_only_its_row() -> None:
    order: list[tuple[str, int]] = []

    def turn(name: str, fails_at: int | None = None) -> Turn[float]:
        def measure(repeat: int) -> Iterator[float]:
            order.append((name, repeat))
            if repeat == fails_at:
                raise ValueError("broke\nwith details")
            yield float(repeat)

        return Turn([{"mode": name}], measure)

    found = take_turns([turn("a"), turn("b", fails_at=0), turn("c", fails_at=1)], 3)
    assert [(one.key["mode"], one.samples, one.failed) for one in found] == [
        ("a", [0.0, 1.0, 2.0], None),
        ("b", [], "ValueError: broke"),
        ("c", [0.0], "ValueError: broke"),
    ]
    assert sorted(order) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    assert [repeat for _, repeat in order] == [0, 0, 0, 1, 1, 2]
    rows = [one.row(3, lambda samples: {"x": plain(sum(samples), "s")}) for one in found]
    assert [bool(one.figures) for one in rows] == [True, False, False]


def test_a_turn_with_too_few_results_fails() -> None:
    keys = [{"state": "cold"}, {"state": "warm"}]
    cold, warm = take_turns([Turn(keys, lambda _: [1.0])], 2)
    assert (cold.samples, cold.failed) == ([1.0, 1.0], None)
    assert warm.failed == "the turn gave fewer results than expected"


@pytest.mark.parametrize("missed", [False, True])
def test_an_interrupt_ends_the_turn_before_the_process(missed: bool) -> None:
    """Also an interrupt that does not wake the waiting thread because it comes just before the wait."""
    program = f"""
import os, signal, time
from skim.bench.turns import alone, check_interrupt
if {missed}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
def work():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        try:
            check_interrupt()
        except KeyboardInterrupt:
            print("the turn ended")
            raise
        time.sleep(0.01)
try:
    alone(work)
except KeyboardInterrupt:
    print("then the rest")
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines() == ["the turn ended", "then the rest"]


def test_prompts_have_the_requested_length_and_depend_on_their_number() -> None:
    prompts = book_prompts(tiny.tokenizer(), 900, seed=1)
    one = prompts(777, 0)
    assert len(one) == 777
    assert one.text is not None
    assert one.text.endswith("Answer:")
    assert one == prompts(777, 0)
    assert one != prompts(777, 1)
    assert one != book_prompts(tiny.tokenizer(), 900, seed=2)(777, 0)
    with pytest.raises(ConfigError, match="contexts must have at least"):
        prompts(20, 0)
    drawn = several(random_prompts(500, 0), 40, 0, 3)
    assert len({one.tokens for one in drawn}) == 3
    assert all(len(one) == 40 and min(one.tokens) >= 250 and max(one.tokens) < 500 for one in drawn)


def test_a_book_is_long_enough_for_any_context() -> None:
    assert len(book_prompts(tiny.tokenizer(), 2_000_000, 0)(1_500_000, 0)) == 1_500_000


def test_a_ceiling_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "buffer_bytes", lambda cached, free: 2**24)
    found = measure_ceiling(torch.device("cpu"), torch.float32, seconds=0.01)
    assert found.flops > 0
    assert found.bandwidth > 0


def test_the_bandwidth_buffer_exceeds_the_caches_and_fits_free_memory() -> None:
    gib = 2**30
    assert buffer_bytes(0, 64 * gib) == gib
    assert buffer_bytes(260 * 2**20, 64 * gib) == 1040 * 2**20
    assert buffer_bytes(8 * gib, 64 * gib) == 16 * gib, "at most a quarter of free memory"
    assert buffer_bytes(0, gib) == gib // 4


def test_the_last_level_caches_of_all_sockets_are_added_up(tmp_path: Path) -> None:
    caches = {
        "cpu0/cache/index0": (1, "32K", "0"),
        "cpu0/cache/index3": (3, "1024K", "0-1"),
        "cpu1/cache/index3": (3, "1024K", "0-1"),  # the same one
        "cpu2/cache/index3": (3, "2048K", "2-3"),
        "cpu3/cache/index3": (3, "unknown", "4"),
    }
    for name, (level, size, cores) in caches.items():
        (tmp_path / name).mkdir(parents=True)
        for file, value in (("level", level), ("size", size), ("shared_cpu_list", cores)):
            (tmp_path / name / file).write_text(f"{value}\n")
    assert last_cache(tmp_path) == 3 * 2**20
    assert last_cache(tmp_path / "nowhere") == 0


def test_shares_are_rescaled_to_the_best_ceiling() -> None:
    figures = {
        "of_peak": Figure(1.2, "share", 1.0, 1.5, 3, "higher"),
        "of_floor": Figure(0.8, "share", 0.7, 0.9, 3, "higher"),
        "floor": Figure(4.0, "ms", 4.0, 4.0, 1, "lower"),
        "step": Figure(5.0, "ms", 4.5, 5.5, 3, "lower"),
    }
    held = rescale_shares(Row({"context": 1}, figures), Ceiling(100.0, 10.0), Ceiling(150.0, 20.0)).figures
    peak, floor = held["of_peak"], held["of_floor"]
    assert [peak.value, peak.low, peak.high] == pytest.approx([0.8, 2 / 3, 1.0])
    assert [floor.value, floor.low, floor.high] == pytest.approx([0.4, 0.35, 0.45])
    assert held["floor"].value == 2.0
    assert held["step"] == figures["step"]


def test_each_turn_has_a_new_thread_but_gpu_turns_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [alone(lambda: threading.current_thread().name) for _ in range(3)]

    def fail() -> None:
        raise ValueError("not today")

    assert all(name.startswith("skim-turn") and "skim-turns" not in name for name in names())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert set(names()) == {"skim-turns_0"}
    with pytest.raises(ValueError, match="not today"):
        alone(fail)
    assert set(names()) == {"skim-turns_0"}
