"""Prefixes that leave the pool and come back: the same text, whatever happens on the way."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skim.config import EngineConfig, PrefillConfig
from skim.engine import keeper as keepers
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Finished, RequestMetrics
from skim.errors import ConfigError, RequestError
from skim.memory import files, spill
from skim.memory.prefix import Namespace
from skim.models.load import load
from skim.sampling.logprobs import TokenLogprob
from skim.sampling.params import SamplingParams
from tests import tiny
from tests.fake import continuation, fake_engine, submit

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SKIMMED = PrefillConfig(
    sparse_prefill="always",
    scorer="random",
    keep_ratio=0.5,
    prefill_block_size=3,
    head_tokens=3,
    tail_tokens=2,
    min_scored_tokens=3,
)
BOOK = [(7 * i + i * i) % 60 for i in range(150)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, so that short prompts have several."""
    monkeypatch.setattr(keepers, "TOKENS", 32)
    monkeypatch.setattr(keepers, "SHORTEST", 8)
    monkeypatch.setattr(keepers, "LEAST_GAIN", 4)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines with a common checkpoint directory."""
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(fake_engine(**{"blocks": 64, "checkpoint_dir": str(tmp_path / "kept"), **settings}))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def run(engine: Engine) -> None:
    while engine.step():
        engine.core.memory.check()


def ask(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], RequestMetrics]:
    handle = submit(engine, prompt, GREEDY, **options)
    run(engine)
    return result(handle)


def result(handle: RequestHandle) -> tuple[list[int], RequestMetrics]:
    events = list(handle)
    assert isinstance(events[-1], Finished)
    return [t for e in events if isinstance(e, Delta) for t in e.token_ids], events[-1].metrics


def evict(engine: Engine) -> None:
    """Evict everything and wait until it is written."""
    engine.core.memory.tree.evict(10_000)
    flush(engine)


def flush(engine: Engine) -> None:
    done = threading.Event()
    engine.keeper._writer.call(done.set)
    assert done.wait(60)


def test_an_evicted_prefix_returns_when_a_request_begins_with_it(make: Callable[..., Engine]) -> None:
    engine = make()
    ask(engine, BOOK)
    evict(engine)
    tokens, metrics = ask(engine, [*BOOK[:140], 9, 9, 9])
    assert tokens == continuation([*BOOK[:140], 9, 9, 9], 6)
    assert (metrics.cached_tokens, metrics.restored_tokens) == (140, 140)
    assert engine.core.memory.match([*BOOK[:140], 9], Namespace()).length == 140
    stats = engine.stats().checkpoints
    assert stats is not None
    assert (stats.restores, stats.restored_tokens, stats.files) == (1, 140, 5)
    assert stats.restored_bytes == 140 * 12
    assert stats.spilled_bytes == stats.bytes
    tokens, metrics = ask(engine, BOOK)  # the rest is still in the directory
    assert (metrics.cached_tokens, metrics.restored_tokens) == (149, 9)
    assert tokens == continuation(BOOK, 6)


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_restart_finds_what_was_cached_when_the_engine_closed(
    make: Callable[..., Engine], block_size: int
) -> None:
    engine = make()
    ask(engine, BOOK)
    engine.close()
    tokens, metrics = ask(make(block_size=block_size), BOOK)
    assert tokens == continuation(BOOK, 6)
    assert metrics.restored_tokens == 149


def test_an_idle_engine_writes_back_what_is_cached(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.start()
    result(submit(engine, BOOK, GREEDY))
    until = time.monotonic() + 60
    while engine.keeper.directory.stats.spills < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.keeper.directory.stats.spills == 5
    time.sleep(0.3)
    assert engine.keeper.idle_seconds is None  # it sleeps until the next request
    tokens, _ = ask(make(), BOOK)  # beside the first one, as if that had been killed
    assert tokens == continuation(BOOK, 6)


def test_tenants_do_not_restore_each_others_prefixes(make: Callable[..., Engine]) -> None:
    engine = make()
    ask(engine, BOOK, cache_salt="one")
    evict(engine)
    assert ask(engine, BOOK, cache_salt="two")[1].restored_tokens == 0
    assert ask(engine, BOOK, use_prefix_cache=False, cache_salt="one")[1].restored_tokens == 0
    evict(engine)
    assert ask(engine, BOOK, cache_salt="one")[1].restored_tokens == 149


def test_a_skimmed_prompt_is_restored_with_its_positions(make: Callable[..., Engine]) -> None:
    engine = make()
    one, first = ask(engine, BOOK, prefill=SKIMMED)
    evict(engine)
    two, second = ask(engine, BOOK, prefill=SKIMMED)
    assert one == two
    assert first.kept_tokens == second.kept_tokens == second.restored_tokens + 1 < 150


def test_a_file_that_is_refused_ends_the_restore_and_the_rest_is_computed(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    ask(engine, BOOK)
    evict(engine)
    [second] = [s for s, _ in engine.keeper.find(BOOK, Namespace()) if s.first == 64]
    path = engine.keeper.directory.path / second.file_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tokens, metrics = ask(engine, BOOK)
    assert tokens == continuation(BOOK, 6)
    assert metrics.restored_tokens == 64
    assert engine.stats().checkpoints.refused == {"tampered": 1}  # type: ignore[union-attr]


def test_other_rows_go_on_while_a_prefix_is_restored(make: Callable[..., Engine]) -> None:
    engine = make(blocks=128)
    ask(engine, BOOK)
    evict(engine)
    slow = threading.Event()
    allocate = engine.keeper._copier.allocate

    def wait(size: int) -> torch.Tensor:
        assert slow.wait(60)
        return allocate(size)

    engine.keeper._copier.allocate = wait  # type: ignore[method-assign]
    restored = submit(engine, BOOK, GREEDY)
    other = submit(engine, [1, 2, 3], GREEDY)
    while other.events.qsize() < 7:
        assert engine.step()
    assert restored.events.empty()
    assert engine.stats().running == 1
    slow.set()
    run(engine)
    assert result(restored)[0] == continuation(BOOK, 6)
    assert result(other)[0] == continuation([1, 2, 3], 6)


def test_an_aborted_restore_gives_its_blocks_back(make: Callable[..., Engine]) -> None:
    engine = make()
    ask(engine, BOOK)
    evict(engine)
    handle = submit(engine, BOOK, GREEDY)
    engine.step()
    handle.abort()
    run(engine)
    assert not engine.core.memory.tables
    assert ask(engine, BOOK)[0] == continuation(BOOK, 6)


def test_as_much_is_restored_as_fits_beside_running_rows(make: Callable[..., Engine]) -> None:
    engine = make(blocks=46)
    ask(engine, BOOK)
    evict(engine)
    beside = submit(engine, list(range(20)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    while beside.events.qsize() < 3:
        engine.step()
    handle = submit(engine, BOOK, GREEDY)
    run(engine)
    assert result(handle)[0] == continuation(BOOK, 6)
    assert result(beside)[0] == continuation(list(range(20)), 60)


def test_a_full_disk_costs_the_spill_and_nothing_else(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    evicted = threading.Event()

    def full(*_: object) -> int:
        assert evicted.wait(60)  # a segment that is lost before its last node is evicted is written again
        raise OSError(errno.ENOSPC, "No space left on device")

    ask(engine, BOOK)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        engine.core.memory.tree.evict(10_000)
        evicted.set()
        flush(engine)
    stats = engine.keeper.directory.stats
    assert (stats.spills, dict(stats.lost), stats.files) == (0, {"disk": 5}, 0)
    tokens, metrics = ask(engine, BOOK)
    assert (tokens, metrics.restored_tokens) == (continuation(BOOK, 6), 0)
    evict(engine)
    assert ask(engine, BOOK)[1].restored_tokens == 149
    assert not list(engine.keeper.directory.path.glob(".*"))


def test_a_slow_disk_costs_spills_and_no_memory(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "QUEUE_BYTES", 900)
    engine = make()
    engine.keeper._writer._limit = 900
    slow, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: slow.wait(60) and fsync(descriptor))
    ask(engine, BOOK)
    engine.core.memory.tree.evict(10_000)
    stats = engine.keeper.directory.stats
    assert stats.lost["queue"] > 0
    assert engine.keeper._writer._waiting <= 900
    slow.set()
    flush(engine)
    assert engine.keeper._writer._waiting == 0
    assert ask(engine, BOOK)[0] == continuation(BOOK, 6)


def drive(engine: Engine, work: Callable[[], Any]) -> Any:
    """Run a blocking call on another thread while this one runs the engine."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        engine.step()
        time.sleep(0.001)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def test_a_named_prefix_is_saved_loaded_and_listed(make: Callable[..., Engine]) -> None:
    engine = make()
    ask(engine, BOOK)
    saved = drive(engine, lambda: engine.save_checkpoint("book", BOOK, Namespace()))
    assert (saved.name, saved.tokens, len(saved.segments)) == ("book", 148, 5)
    assert saved.bytes == engine.keeper.directory.stats.bytes
    other = make()
    assert drive(other, lambda: other.load_checkpoint("book")) == 148
    assert other.core.memory.match(BOOK, Namespace()).length == 148
    assert not other.core.memory.tables
    tokens, metrics = ask(other, BOOK)
    assert (tokens, metrics.cached_tokens, metrics.restored_tokens) == (continuation(BOOK, 6), 148, 0)
    for wrong, message in (("nothing", "no checkpoint 'nothing'"), ("../x", "name has up to")):
        with pytest.raises(RequestError, match=message):
            drive(other, lambda wrong=wrong: other.load_checkpoint(wrong))
    with pytest.raises(RequestError, match="another cache salt"):
        drive(other, lambda: other.load_checkpoint("book", "salt"))
    with pytest.raises(RequestError, match="0 of its 20 tokens are cached"):
        drive(other, lambda: other.save_checkpoint("else", [5] * 20, Namespace()))


def test_a_name_may_end_inside_a_file_and_be_loaded_again(make: Callable[..., Engine]) -> None:
    """Its last file is longer if a later prompt shares it. Then nothing is left to restore."""
    engine = make()
    ask(engine, BOOK)
    evict(engine)
    ask(engine, BOOK)
    drive(engine, lambda: engine.save_checkpoint("part", BOOK[:140], Namespace()))
    other = make()
    for _ in range(3):
        assert drive(other, lambda: other.load_checkpoint("part")) == 140
    assert ask(other, BOOK)[0] == continuation(BOOK, 6)


def test_a_named_prefix_that_does_not_fit_the_cap_is_refused(make: Callable[..., Engine]) -> None:
    engine = make(checkpoint_size=1000)
    ask(engine, BOOK)
    with pytest.raises(RequestError, match="checkpoint_size is"):
        drive(engine, lambda: engine.save_checkpoint("book", BOOK, Namespace()))


def test_checkpoints_need_prefix_caching_and_a_directory(make: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        make(enable_prefix_caching=False)
    with pytest.raises(RequestError, match="start with checkpoint_dir"):
        fake_engine(blocks=8).load_checkpoint("book")


# -- a real model

FORMATS = ["auto", "int8", "int4", "k8v4"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("form", FORMATS)
def test_restored_equals_cold_alone_and_beside_cold_rows(path: Path, tmp_path: Path, form: str) -> None:
    config = EngineConfig.of(
        model=str(path),
        kv_memory="4M",
        kv_cache_dtype=form,
        checkpoint_dir=str(tmp_path),
        max_num_batched_tokens=64,
    )
    model = load(path, config.model)
    book, other = [i * i % 250 for i in range(300)], [i * 7 % 250 for i in range(90)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)

    def reply(engine: Engine, *prompts: list[int]) -> list[list[TokenLogprob]]:
        handles = [submit(engine, prompt, params, cache_salt=str(i)) for i, prompt in enumerate(prompts)]
        run(engine)
        return [[e.logprobs[0] for e in handle if isinstance(e, Delta)] for handle in handles]

    # Rounding of sums may change a code: replies may then differ by a small part of what the format loses.
    whole = Engine(model, EngineConfig.of(model=str(path), kv_memory="4M", max_num_batched_tokens=64))
    [precise] = reply(whole, book)
    whole.close()
    engine = Engine(model, config)
    cold, beside = reply(engine, book, other)
    same = itertools.takewhile(
        lambda pair: pair[0].token_id == pair[1].token_id, zip(precise, cold, strict=True)
    )
    near = max([1e-3, *(abs(a.logprob - b.logprob) / 20 for a, b in same)])
    stored = planes_of(engine, book)
    [hit] = reply(engine, book)
    engine.close()
    again = Engine(model, config)
    [restored] = reply(again, book)
    if form == "auto":
        assert restored == hit  # a restored prefix is one that was never evicted, bit by bit
    else:  # torch's attention sums in the order of blocks, and one of codes may then be rounded differently
        assert [e.token_id for e in restored] == [e.token_id for e in hit]
        assert [e.logprob for e in restored] == pytest.approx([e.logprob for e in hit], abs=near)
    assert torch.equal(planes_of(again, book), stored)
    assert again.stats().tokens_computed == 12
    again.close()
    again = Engine(model, config)
    for one, expected in zip(reply(again, book, other[:20], other), (cold, None, beside), strict=True):
        if expected is not None:
            assert [each.token_id for each in one] == [each.token_id for each in expected]
            assert [e.logprob for e in one] == pytest.approx([e.logprob for e in expected], abs=near)
    # The book, and the beginning of the other prompt if its file was written before the engine closed.
    assert again.stats().checkpoints.restored_tokens in (299, 299 + 19)  # type: ignore[union-attr]
    again.close()


@pytest.mark.parametrize(
    ("before", "after"), [("auto", "int8"), ("int8", "auto"), ("int8", "k8v4"), ("k8v4", "int8")]
)
def test_a_prefix_is_restored_in_the_running_format(
    path: Path, tmp_path: Path, before: str, after: str
) -> None:
    book = [i * i % 250 for i in range(300)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
    found = {}
    for form, kept in ((before, "kept"), (after, "kept"), (after, "other")):
        config = EngineConfig.of(
            model=str(path), kv_memory="4M", kv_cache_dtype=form, checkpoint_dir=str(tmp_path / kept)
        )
        engine = Engine(load(path, config.model), config)
        handle = submit(engine, book, params)
        run(engine)
        events = list(handle)
        assert isinstance(events[-1], Finished)
        found[form, kept] = events[-1].metrics.restored_tokens, events[0].logprobs[0]
        engine.close()
    restored, logprob = found[after, "kept"]
    assert restored >= 288
    cold, expected = found[after, "other"]
    assert cold == 0
    assert logprob.logprob == pytest.approx(expected.logprob, abs=0.1)


def planes_of(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Everything stored for the whole blocks of cached tokens."""
    pool = engine.core.memory.pool
    match = engine.core.memory.match(tokens, Namespace("0"), whole=True)
    length = match.length - match.length % pool.block_size
    assert length >= len(tokens) - pool.block_size - 1
    return engine.keeper._copier.read(match.tables, 0, length).wait()
