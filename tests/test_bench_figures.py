"""The formulas of `skim bench` against cases computed by hand, and how contenders take turns."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from skim.bench import decode, ttft
from skim.bench.ceiling import measure_ceiling
from skim.bench.decode import Sample
from skim.bench.drive import FirstToken, Phases, Steps
from skim.bench.inputs import book_prompts, random_prompts, several
from skim.bench.turns import Turn, take_turns
from skim.bench.work import Work, seen_pairs, work_of
from skim.errors import ConfigError
from skim.measure.modes import parse_mode
from skim.measure.report import Row, plain
from skim.memory.pool import LayerShape
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
    work = Work(1000, 50, 4200, query_heads=4, layers=(LAYER, LAYER), windows=(None, 2))
    # 10 tokens: 2 for each of 1000 parameters, once 2 for 50; 55 pairs and, in the window, 1 + 9 * 2
    assert work.prefill_flops(10) == 20_000 + 100 + 2 * 4 * (8 + 4) * (55 + 19)
    assert work.prefill_flops(1, cached=9) == 2_000 + 100 + 2 * 4 * (8 + 4) * (10 + 2)
    # a token has 2 * (8 + 4) numbers in a layer
    assert work.kv_bytes(10, itemsize=2) == 24 * 10 * 2 + 24 * 2 * 2
    assert work.step_bytes([10, 10], itemsize=2) == 4200 + 2 * (480 + 96)


def test_a_modules_numbers() -> None:
    module = tiny.build("qwen3")
    work = work_of(module, (LAYER,) * 4)
    body = 4 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96)
    norms = 4 * (2 * 32 + 2 * 64) + 64
    assert (work.body_params, work.head_params) == (body, 64 * 258)
    assert work.weight_bytes == 4 * (body + norms + 64 * 258)  # the table of embeddings is not read
    assert work.windows == (None,) * 4


def test_tied_weights_are_read_once_and_experts_by_what_a_token_uses() -> None:
    sliding = work_of(tiny.build("gemma3"), (LAYER,) * 4)
    assert sliding.windows == (tiny.WINDOW, None) * 2
    experts = tiny.build("gpt_oss")
    whole = sum(parameter.numel() for parameter in experts.parameters() if parameter.ndim == 3)
    flat = sum(
        p.numel()
        for n, p in experts.named_parameters()
        if p.ndim == 2 and "embed" not in n and "head" not in n
    )
    assert work_of(experts, (LAYER,) * 4).body_params == flat + whole // 2  # 2 of 4 experts


def sample(seconds: float, **changes: float) -> FirstToken:
    parts = {"queue": 0.1 * seconds, "scoring": 0.3 * seconds, "prefill": 0.6 * seconds, **changes}
    return FirstToken(seconds, 0.5, 100, Phases(**parts, kept=50, cached=0))


def test_the_parts_are_of_the_median_run() -> None:
    found = ttft.figures_of([sample(3.0), sample(1.0), sample(2.0, queue=0.0, scoring=1.5, prefill=0.5)])
    assert found["ttft"].value == 2.0
    assert (found["ttft"].low, found["ttft"].high, found["ttft"].n) == (1.0, 3.0, 3)
    assert found["ttft_p99"].value == pytest.approx(2.98)
    assert [found[name].value for name in ("queue", "scoring", "prefill")] == [0.0, 1.5, 0.5]
    assert (found["scoring"].low, found["scoring"].high) == (pytest.approx(0.3), 1.5)
    assert found["kept"].value == 0.5
    even = ttft.figures_of([sample(4.0), sample(1.0), sample(2.0), sample(3.0)])
    assert even["ttft"].value == 2.5
    assert sum(even[name].value for name in ("queue", "scoring", "prefill")) == pytest.approx(2.5)


def test_steps_and_their_floor() -> None:
    found = decode.figures_of(
        [Sample(Steps((0.01, 0.02, 0.03), (10, 10)), 5_000), Sample(Steps((0.04,) * 3, (10, 10)), 5_000)], 1e6
    )
    assert found["step"].value == pytest.approx(30.0)
    assert found["throughput"].value == pytest.approx((2 / 0.02 + 2 / 0.04) / 2)
    assert found["floor"].value == pytest.approx(5.0)
    assert found["of_floor"].value == pytest.approx(5 / 30)


def row(mode: str, context: int, seconds: float | None, state: str = "cold") -> Row:
    key = {"context": context, "mode": mode, "state": state}
    return Row(key, failed="broke") if seconds is None else Row(key, {"ttft": plain(seconds, "s")})


def test_the_crossover_is_where_sparse_stays_ahead() -> None:
    modes = [parse_mode("dense"), parse_mode("lexical:0.1"), parse_mode("cascade:0.1")]
    times = {1: (1.0, 0.9, 2.0), 2: (2.0, 2.1, 3.0), 4: (4.0, 2.0, 5.0), 8: (8.0, 3.0, 9.0)}
    rows = [row(m.name, c, t) for c, each in times.items() for m, t in zip(modes, each, strict=True)]
    rows += [row("lexical:0.1", 2, 0.1, "warm"), row("dense", 16, None), row("lexical:0.1", 16, 99.0)]
    assert ttft.crossovers(rows, modes) == {"lexical:0.1": 4, "cascade:0.1": None}
    assert ttft.crossovers(rows[:6], modes) == {}
    assert ttft.crossovers(rows, modes[1:]) == {}


def test_turns_rotate_and_a_failure_is_the_rows_own() -> None:
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
    assert order == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("a", 1), ("a", 2)]
    rows = [one.row(3, lambda samples: {"x": plain(sum(samples), "s")}) for one in found]
    assert [bool(one.figures) for one in rows] == [True, False, False]


def test_a_turn_that_gives_too_little_has_failed() -> None:
    keys = [{"state": "cold"}, {"state": "warm"}]
    cold, warm = take_turns([Turn(keys, lambda _: [1.0])], 2)
    assert (cold.samples, cold.failed) == ([1.0, 1.0], None)
    assert warm.failed == "fewer results came back than asked for"


def test_an_interrupt_ends_the_turn_before_the_process() -> None:
    program = """
import os, signal, time
from skim.bench.turns import alone, check_interrupt
def work():
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


def test_prompts_have_the_length_asked_for_and_repeat_by_their_number() -> None:
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


def test_a_ceiling_is_measured() -> None:
    found = measure_ceiling(torch.device("cpu"), torch.float32, seconds=0.01)
    assert found.flops > 0
    assert found.bandwidth > 0
