"""A model that is parked, released and brought back computes the same, and a failed move moves nothing."""

from __future__ import annotations

import gc
import itertools
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from skim.errors import EngineError, MoveError, ParkedError
from skim.models import residency as module_under_test
from skim.models import scratch
from skim.models.arrival import Arrivals
from skim.models.forwards import eight_bits
from skim.models.forwards.eight_bits import EightBitOps
from skim.models.forwards.lean import lean_layers
from skim.models.forwards.packed import pack_products
from skim.models.residency import Residency
from skim.models.residency_state import Direction, Place
from skim.models.scratch import ScratchFile
from skim.models.storages import Storages
from tests import tiny
from tests.models.test_storages import CPU, model

OTHER_GPU = torch.device("cuda:1")
KINDS = ["plain", "tied", "packed", "int8", "int4"]


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))


def residency_of(module: Any) -> Residency:
    return Residency("tiny", module, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_identical_after_any_sequence_of_moves(kind: str) -> None:
    draw = random.Random(kind)
    module = model(kind, seed=5)
    few, many = tiny.logits(module, 4), tiny.logits(module, 30)
    one = residency_of(module)
    size = one.device_bytes
    for _ in range(12):
        for to in draw.choices([Place.PARKED, Place.RELEASED], k=draw.randrange(1, 4)):
            keep = draw.random() < 0.3
            one.park(to, keep_table=keep)
            state = one.state("target")
            assert (state.place, state.disk_bytes) == (to, size - (one.table_bytes if keep else 0)) or (
                state.disk_bytes == size  # the table was copied in an earlier move
            )
            with pytest.raises(ParkedError, match=f"tiny is {to}"):
                tiny.logits(module, 4)
        one.unpark()
        assert one.state("target").device_bytes == one.size == size
        assert torch.equal(tiny.logits(module, 4), few)
        assert torch.equal(tiny.logits(module, 30), many)


def test_weights_that_packing_replaces_are_forgotten() -> None:
    """After a park and a return, the old weights would otherwise stay in memory beside the packed ones."""
    module = model("plain", seed=7)
    expected = tiny.logits(module, 4)
    one = residency_of(module)
    one.park()
    one.unpark()
    old = [weakref.ref(part) for part in module.parameters()]
    pack_products(module)
    one.forget_replaced()
    gc.collect()
    live = {storage for _, storages in one._groups for storage in storages.identities}
    assert live <= {part.untyped_storage()._cdata for part in (*module.parameters(), *module.buffers())}
    assert sum(ref() is None for ref in old) >= 5  # the products of every layer
    one.park()
    one.unpark()
    assert one.state("target").device_bytes == one.size
    torch.testing.assert_close(tiny.logits(module, 4), expected)


def test_a_kept_table_can_be_read_while_the_rest_is_parked() -> None:
    module = model("plain", seed=6)
    expected = module.get_input_embeddings().weight.clone()
    one = residency_of(module)
    one.park(keep_table=True)
    assert one.device_bytes == one.table_bytes == expected.nbytes
    assert torch.equal(module.get_input_embeddings().weight, expected)
    one.park()
    assert one.device_bytes == 0
    one.park(keep_table=True)  # nothing else moves
    assert one.device_bytes == one.table_bytes


def test_a_park_that_fails_leaves_no_table_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one = residency_of(model("plain", seed=6))
    one.park()
    monkeypatch.setattr(Storages, "keep_host_copy", lambda self: None)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left")

    one._file = None
    for _, storages in one._groups:  # as if they were in host memory: a release writes them to disk
        monkeypatch.setattr(storages, "_file", None)
    monkeypatch.setattr(Storages, "keep_file_copy", full)
    with pytest.raises(MoveError, match="No space left"):
        one.park(Place.RELEASED, keep_table=True)
    assert (one.place, one.device_bytes) == (Place.PARKED, 0)


def test_a_move_is_logged_with_the_role_and_says_if_nothing_was_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    one = residency_of(model("plain", seed=6))
    one.role = "drafter"
    for _ in range(2):
        one.park()
        one.unpark()
    first, returned, second, _ = caplog.messages
    assert re.fullmatch(r"the drafter tiny: \d.* MiB to disk in .* s", first)
    assert re.fullmatch(r"the drafter tiny: \d.* MiB to device in .* s", returned)
    assert re.fullmatch(
        r"the drafter tiny: parked on disk without copying, an earlier copy is there, in .* s", second
    )


def test_a_measurement_during_a_move_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = residency_of(model("plain", seed=6))
    size = one.size
    measure = module_under_test._live_bytes
    moves = iter([one.park])

    def measure_slowly(*args: Any) -> int:
        found = measure(*args)
        for move in moves:
            move()
        return found

    monkeypatch.setattr(module_under_test, "_live_bytes", measure_slowly)
    one.recount()
    assert one.device_bytes == size  # as it was when the question came
    assert one.device_bytes == 0


def test_weights_that_are_repacked_later_are_parked_as_they_are_then() -> None:
    module = model("plain", seed=7)
    expected = tiny.logits(module, 20)
    one = residency_of(module)
    one.park()
    one.unpark()
    assert lean_layers(module) == 4
    one.park()
    assert one.device_bytes == 0
    one.unpark()
    assert torch.allclose(tiny.logits(module, 20), expected, atol=1e-4)


def test_transfers_are_counted_and_a_second_park_copies_nothing() -> None:
    one = residency_of(model("plain", seed=8))
    size = one.size
    for _ in range(3):
        one.park()
        one.park()
        one.unpark()
        one.unpark()
    state = one.state("drafter")
    assert (state.model, state.role) == ("tiny", "drafter")
    parks, returns = state.transfers[Direction.TO_DISK], state.transfers[Direction.TO_DEVICE]
    assert (parks.count, parks.bytes) == (3, size)
    assert (returns.count, returns.bytes) == (3, 3 * size)
    assert state.last is not None
    assert (state.last.direction, state.last.bytes) == (Direction.TO_DEVICE, size)
    assert 0 < state.last.seconds <= returns.seconds


def test_fifty_cycles_leave_memory_file_and_descriptors_as_they_were(tmp_path: Path) -> None:
    module = tiny.with_our_attention("llama").requires_grad_(False)
    module.lm_head = torch.nn.Linear(64, 100_000, bias=False).requires_grad_(False)  # 25.6 MB, to be visible
    one = residency_of(module)
    process = psutil.Process()

    def measured() -> tuple[int, int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_fds(), len(list(tmp_path.iterdir()))

    one.park()
    one.unpark()
    memory, descriptors, files = measured()
    for _ in range(50):
        one.park(Place.RELEASED)
        one.unpark()
    after, descriptors_after, files_after = measured()
    assert abs(after - memory) < 0.02 * memory
    assert (descriptors_after, files_after) == (descriptors, files) == (descriptors, 0)
    assert one.state("target").disk_bytes == one.size
    parked = measured()[0]
    one.park()
    assert measured()[0] < parked - 0.9 * 25.6e6
    one.unpark()
    del one
    gc.collect()
    assert process.num_fds() == descriptors - 1


def _message_of(move: Callable[[], None]) -> str | None:
    try:
        move()
    except EngineError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_a_move_that_fails_at_any_point_moves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected at random points: no memory, a full disk, a broken read."""
    draw = random.Random(kind)
    module = model(kind, seed=9)
    expected = tiny.logits(module, 7)
    one = residency_of(module)
    failures = 0
    for _ in range(40):
        was, used = one.place, one.state("target").disk_bytes
        error = draw.choice([torch.OutOfMemoryError("no memory"), OSError(28, "No space left")])
        points = [
            (Storages, "keep_file_copy"),
            (ScratchFile, "append"),
            (Storages, "fill"),
            (ScratchFile, "read"),
        ]
        owner, name = draw.choice(points[:2] if was is Place.RESIDENT else points[2:])
        left = iter(range(draw.randrange(9)))
        with monkeypatch.context() as broken:
            original = getattr(owner, name)

            def fail(*args: Any, error: Any = error, left: Any = left, original: Any = original) -> Any:
                if next(left, None) is None:
                    raise error
                return original(*args)

            broken.setattr(owner, name, fail)
            failed = _message_of(one.park if was is Place.RESIDENT else one.unpark)
        if failed is not None:
            failures += 1
            assert str(was) in failed
            assert one.place is was
            assert one.device_bytes == (one.size if was is Place.RESIDENT else 0)
            assert was is not Place.RESIDENT or one.state("target").disk_bytes == used
        if one.place is Place.RESIDENT:
            assert torch.equal(tiny.logits(module, 7), expected)
            if draw.random() < 0.7:
                one = residency_of(module)  # it has no copies yet
    one.unpark()
    assert torch.equal(tiny.logits(module, 7), expected)
    assert failures > 10


def test_memory_that_numpy_has_seen_since_cannot_be_parked_and_stays() -> None:
    module = model("plain", seed=10)
    expected = tiny.logits(module, 7)
    one = residency_of(module)
    one.park()
    one.unpark()
    module.lm_head.weight.numpy()
    one.park()  # its owner is copied, since nothing else aliases it
    one.unpark()
    assert torch.equal(tiny.logits(module, 7), expected)


def test_the_host_copy_is_dropped_where_host_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is none, so a copy in host memory stands in for a GPU's."""
    one = residency_of(model("plain", seed=11))
    one.park()
    for _, storages in one._groups:
        storages.keep_host_copy()
    for free, left in ((10 * one.size, True), (one.size // 2, False)):
        monkeypatch.setattr(module_under_test, "free_bytes", lambda _, free=free: free)
        one.unpark()
        assert bool(one.state("target").host_bytes) is left
        one.park()
        if left:
            for _, storages in one._groups:
                storages.keep_host_copy()


def test_a_copy_that_host_memory_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = residency_of(model("plain", seed=11))
    one._survey()
    groups = [storages for _, storages in one._groups]
    monkeypatch.setattr(module_under_test, "free_bytes", lambda _: one.size - 1)
    with pytest.raises(EngineError, match=r"a copy takes .* of host memory, .* free; it stays resident"):
        one._copy(groups, on_disk=False)
    assert one.state("target").host_bytes == 0
    monkeypatch.setattr(module_under_test, "free_bytes", lambda _: one.size)
    assert one._copy(groups, on_disk=False) == one.size


def test_rounded_weights_are_freed_with_those_they_were_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = EightBitOps()
    monkeypatch.setattr(module_under_test, "for_ranking", lambda: ops)
    module, other = model("packed", seed=12), model("packed", seed=13)
    given = torch.randn(3, 64)
    products = {}
    for one in (module, other):
        weight = one.model.layers[0].self_attn.o_proj.weight.detach()
        products[one] = weight, ops.product(given, weight, None)
    assert len(ops._rounded) == 2
    residency = residency_of(module)
    residency.park()
    assert [weight is products[other][0] for weight in ops._rounded] == [True]
    residency.unpark()
    assert torch.equal(ops.product(given, products[module][0], None), products[module][1])
    assert eight_bits.for_ranking is not module_under_test.for_ranking


class FakeEvent:
    """Complete once `done`. A stream that waits for it must be that of the second GPU."""

    def __init__(self, *, enable_timing: bool = True) -> None:
        self.waits = 0
        self.done = False
        self.at = 0.0

    def wait(self, stream: Any = None) -> None:
        assert stream == ("stream of", OTHER_GPU)
        self.waits += 1

    def record(self, stream: Any) -> None:
        self.at = next(stream.clock)

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


@pytest.fixture
def faked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 500.0)  # milliseconds, one step for each recorded event
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(clock=clock))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))


def test_every_arrival_is_timed_once_whenever_it_is_asked_for(faked_gpu: None) -> None:
    arrivals = Arrivals(OTHER_GPU)
    for size in (10, 20):  # nobody asks between the first two
        arrivals.begin(size)
        arrivals.end()
    arrivals.begin(30)
    assert arrivals.finished() is None
    for _, after, _ in arrivals._timed:
        after.done = True
    assert [arrivals.finished() for _ in range(3)] == [(10, 0.5), (20, 0.5), None]
    arrivals.cancel()
    arrivals.end()
    assert arrivals.finished() is None


def test_each_layer_waits_once_for_its_own_weights_and_then_is_as_before(faked_gpu: None) -> None:
    module = model("plain", seed=14)
    layers = list(module.model.layers)
    compiled = lambda *args, **kwargs: layers[1]._call_impl(*args, **kwargs)  # noqa: E731
    layers[1]._compiled_call_impl = compiled
    expected = tiny.logits(module, 5)
    assert Arrivals(CPU).begin(100) is None  # a CPU copies at once
    arrivals, first, events = Arrivals(OTHER_GPU), FakeEvent(), [FakeEvent() for _ in layers]
    arrivals.expect(None, first)
    for layer, event in zip(layers, events, strict=True):
        arrivals.expect(layer, event)
    assert (first.waits, [event.waits for event in events]) == (1, [0] * 4)
    assert arrivals
    for _ in range(2):
        assert torch.equal(tiny.logits(module, 5), expected)
        assert [event.waits for event in events] == [1] * 4
    assert not arrivals
    assert [layer._compiled_call_impl for layer in layers] == [None, compiled, None, None]
    for layer, event in zip(layers[:2], events, strict=False):
        arrivals.expect(layer, event)
    arrivals.wait()
    assert [event.waits for event in events] == [2, 2, 1, 1]
    assert [layer._compiled_call_impl for layer in layers] == [None, compiled, None, None]
