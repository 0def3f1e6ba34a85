"""Checkpoint files and their directory: what is refused, what a crash leaves, what goes first."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from skim.errors import ConfigError, RequestError
from skim.memory import files
from skim.memory.checkpoint import CheckpointDir, Shelf
from skim.memory.files import PREFIX, sweep, write_file
from skim.memory.prefix import OFFSET_SHIFT, Namespace
from skim.memory.segment import (
    Field,
    Identity,
    RefusedFile,
    Segment,
    data_bytes,
    encode,
    hide,
    next_link,
    read,
    views,
)

SIZE = 8
IDENTITY = Identity("tiny", "f" * 24, SIZE)
FORM = (
    Field("0.scale", torch.float32, ()),
    Field("0.key", torch.bfloat16, (2, 4)),
    Field("0.codes", torch.int8, (2, 3)),
)
LARGE = 2**30


def keys_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50) for _ in range(count)]


def segments_of(keys: list[int], namespace: Namespace | None = None) -> list[Segment]:
    """The chain of a prefix."""
    namespace = namespace or Namespace()
    link, found = IDENTITY.root(namespace), []
    for first in range(0, len(keys), SIZE):
        mine = array("q", keys[first : first + SIZE])
        one = Segment(
            link, next_link(link, mine), first, mine, hide(namespace.salt), namespace.policy, FORM, "int8"
        )
        link = one.link
        found.append(one)
    return found


def data_of(segment: Segment) -> torch.Tensor:
    made = torch.Generator().manual_seed(int(segment.link[:8], 16))
    return torch.randint(0, 100, (segment.data_bytes,), dtype=torch.uint8, generator=made)


def put(directory: CheckpointDir, keys: list[int], namespace: Namespace | None = None) -> list[Segment]:
    chain = segments_of(keys, namespace)
    for one in chain:
        directory.write(one, encode(one, IDENTITY, data_of(one)))
    return chain


def found(directory: CheckpointDir, keys: list[int], namespace: Namespace | None = None) -> int:
    parts = directory.find(keys, namespace or Namespace())
    return sum(count for _, count in parts)


def allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDir:
    return CheckpointDir(tmp_path, LARGE, IDENTITY)


def test_a_file_is_safetensors_with_what_it_holds(directory: CheckpointDir) -> None:
    keys = [*range(8), 8 + (3 << OFFSET_SHIFT), 9 - (2 << OFFSET_SHIFT)]
    _, last = put(directory, keys, Namespace("secret", "sparse"))
    path = directory.path / last.file_name
    with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        about = json.loads(file.metadata()["skim"])
    loaded = safetensors.torch.load_file(path)
    assert loaded["tokens"].tolist() == [8, 9]
    assert loaded["positions"].tolist() == [8 + 3, 9 - 2]
    expected = views(FORM, data_of(last), 2)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert about.items() >= {
        "version": 2, "model": "tiny", "fingerprint": "f" * 24, "first": 8, "tokens": 2, "policy": "sparse",
        "format": "int8",
    }.items()  # fmt: skip
    assert b"secret" not in path.read_bytes()
    segment, data = read(path, IDENTITY, allocate)
    assert segment == last
    assert torch.equal(data, data_of(last))
    assert path.stat().st_mode & 0o077 == 0


def change_header(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    about = json.loads(table["__metadata__"]["skim"])
    change(about)
    table["__metadata__"]["skim"] = json.dumps(about)
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut in its data": ("torn", lambda raw: raw[:-5]),
    "cut in its header": ("torn", lambda raw: raw[:40]),
    "empty": ("torn", lambda raw: b""),
    "longer": ("torn", lambda raw: raw + b"x"),
    "a header of absurd length": ("torn", lambda raw: b"\xff" * 8 + raw[8:]),
    "another program's": ("foreign", lambda raw: (2).to_bytes(8, "little") + b"{}" + raw),
    "not JSON": ("foreign", lambda raw: raw[:8] + b"!" + raw[9:]),
    "another model's": ("foreign", lambda raw: change_header(raw, lambda a: a.update(fingerprint="0" * 24))),
    "of a later version": ("future", lambda raw: change_header(raw, lambda a: a.update(version=3))),
    "of an earlier version": ("outdated", lambda raw: change_header(raw, lambda a: a.update(version=1))),
    "one bit of its data": ("tampered", lambda raw: flip(raw, len(raw) - 1)),
    "one bit of its tokens": ("tampered", lambda raw: flip(raw, 8 + int.from_bytes(raw[:8], "little"))),
    "its policy": ("tampered", lambda raw: change_header(raw, lambda a: a.update(policy="other"))),
    "its place": ("tampered", lambda raw: change_header(raw, lambda a: a.update(first=16))),
    "negative tokens": ("tampered", lambda raw: change_header(raw, lambda a: a.update(tokens=-8))),
    "tensors that overlap": ("tampered", lambda raw: raw.replace(b'"shape":[8,2,4]', b'"shape":[8,4,2]')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name_with_the_reason(directory: CheckpointDir, damage: str) -> None:
    keys = keys_of(0, 24)
    chain = put(directory, keys)
    path = directory.path / chain[1].file_name
    reason, change = DAMAGE[damage]
    raw = change(path.read_bytes())
    path.write_bytes(raw)
    if damage == "tensors that overlap":  # every length still fits: only the pool can tell
        assert read(path, IDENTITY, allocate)[0].form != FORM
        return
    with pytest.raises(RefusedFile, match=path.name) as refused:
        read(path, IDENTITY, allocate)
    assert refused.value.reason == reason
    again = CheckpointDir(directory.root, LARGE, IDENTITY)
    header_tells = damage not in ("one bit of its data", "its policy")  # the digest is checked with the data
    assert found(again, keys) == (8 if header_tells else 24)
    assert dict(again.stats.refused) == ({reason: 1} if header_tells else {})


def test_the_longest_stored_prefix_is_found_and_shared(directory: CheckpointDir) -> None:
    book = keys_of(1, 20)
    put(directory, book)
    other = [*book[:11], 99, *book[12:]]
    assert [found(directory, keys) for keys in (book, [*book, 5], book[:19], book[:3], other)] == [
        20,
        20,
        19,
        3,
        11,
    ]
    put(directory, other)
    assert [found(directory, keys) for keys in (book, other)] == [20, 20]
    assert len(list(directory.path.iterdir())) == 5  # the first segment is stored once
    assert found(directory, book, Namespace("tenant")) == 0
    assert found(directory, book, Namespace(policy="sparse")) == 0


def test_a_longer_file_replaces_the_beginning_that_it_contains(directory: CheckpointDir) -> None:
    keys = keys_of(2, 16)
    put(directory, keys[:11])
    put(directory, keys)
    assert len(list(directory.path.iterdir())) == 2
    assert found(directory, keys) == 16


def test_the_least_recently_used_go_first_and_named_ones_stay(tmp_path: Path) -> None:
    size = len(b"".join(map(bytes, encode(one := segments_of(keys_of(0, 8))[0], IDENTITY, data_of(one)))))
    directory = CheckpointDir(tmp_path, 4 * size + size // 2, IDENTITY)
    named, old, used = ([seed, *keys_of(seed, 7)] for seed in (1, 2, 3))
    directory.name("book", put(directory, named), 8)
    put(directory, old)
    chain = put(directory, used)
    for path in directory.path.glob("*.safetensors"):
        os.utime(path, ns=(10**9, 10**9))
    directory.touch(chain)
    new = keys_of(4, 16)
    put(directory, new)
    assert [found(directory, keys) for keys in (named, old, used, new)] == [8, 0, 8, 16]
    assert directory.stats.bytes <= directory.most_bytes  # type: ignore[operator]
    assert directory.stats.bytes == sum(path.stat().st_size for path, _ in directory.files())
    with pytest.raises(RequestError, match="raise it, or remove some"):
        directory.check_room(4 * size)


def test_named_prefixes_are_listed_replaced_and_removed_with_what_only_they_have(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path, LARGE, IDENTITY)
    start = keys_of(5, 8)
    one, two = [*start, *keys_of(6, 8)], [*start, *keys_of(7, 8)]
    directory.name("one", put(directory, one), 16)
    directory.name("two", put(directory, two), 16)
    shelf = Shelf(tmp_path)
    assert [(each.name, each.model, each.tokens) for each in shelf.named()] == [
        ("one", "tiny", 16),
        ("two", "tiny", 16),
    ]
    shelf.remove("one")
    again = CheckpointDir(tmp_path, LARGE, IDENTITY)
    assert [found(again, keys) for keys in (one, two)] == [8, 16]
    assert again.get("two")[0].tokens == 16
    with pytest.raises(RequestError, match="no checkpoint 'one'"):
        again.get("one")
    with pytest.raises(RequestError, match="one was saved by 'tiny'"):
        CheckpointDir(tmp_path, LARGE, Identity("else", "e" * 24, SIZE)).get("two")
    with pytest.raises(RequestError, match="no checkpoint 'one'"):
        shelf.remove("one")
    for name in ("", "../x", "a/b", ".hidden", "x" * 101):
        with pytest.raises(RequestError, match="name has up to"):
            again.get(name)


def test_a_list_of_segments_that_points_elsewhere_is_refused(directory: CheckpointDir) -> None:
    directory.name("book", put(directory, keys_of(1, 8)), 8)
    path = directory.path / "book.json"
    about = json.loads(path.read_text())
    for change in (
        {"segments": ["../../x.safetensors"]},
        {"version": 9},
        {"version": 1},
        {"name": "other"},
        {"extra": 1},
    ):
        path.write_text(json.dumps({**about, **change}))
        assert directory.named() == []


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    one, two = (CheckpointDir(tmp_path, LARGE, IDENTITY) for _ in range(2))
    keys = keys_of(8, 16)
    chain = put(one, keys)
    assert found(two, keys) == 0
    two.refresh()
    assert found(two, keys) == 16
    (one.path / chain[1].file_name).unlink()
    with pytest.raises(RefusedFile) as refused:
        read(two.path / chain[1].file_name, IDENTITY, allocate)
    two.refuse(chain[1], refused.value)
    assert (refused.value.reason, found(two, keys)) == ("missing", 8)
    put(two, keys)  # both may write the same file
    put(one, keys)
    two.refresh()
    assert found(two, keys) == 16


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint_dir '.*file' cannot be used") as refused:
        CheckpointDir(tmp_path / "file", LARGE, IDENTITY)
    assert refused.value.fields == ("checkpoint_dir",)


def test_a_full_disk_leaves_no_trace(directory: CheckpointDir, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write

    def full(descriptor: int, data: memoryview) -> int:
        written(descriptor, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        put(directory, keys_of(0, 8))
    assert list(directory.path.iterdir()) == []


def test_leftovers_of_ended_writers_are_removed_and_others_stay(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / f"{PREFIX}1-dead").write_text("half")
    with open(tmp_path / f"{PREFIX}2-alive", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}2-alive"]
    write_file(tmp_path / "whole", [b"ab", memoryview(b"cd")])
    assert (tmp_path / "whole").read_bytes() == b"abcd"


# -- a process that is killed in the middle of a save

OLD, NEW = keys_of(10, 30), keys_of(11, 40)


def save(root: Path, keys: list[int]) -> None:
    directory = CheckpointDir(root, LARGE, IDENTITY)
    directory.name("book", put(directory, keys), len(keys))


def judge(root: Path, *, old: bool) -> str:
    """Check that the directory holds the old checkpoint, the new one or none, and every file is whole."""
    directory = CheckpointDir(root, LARGE, IDENTITY)
    assert not directory.stats.refused
    for path in directory.path.glob("*.safetensors"):
        segment, data = read(path, IDENTITY, allocate)
        assert torch.equal(data, data_of(segment))
    assert not list(directory.path.glob(f"{PREFIX}*"))
    try:
        named, segments = directory.get("book")
    except RequestError:
        assert not old
        return "none"
    keys = [key for one in segments for key in one.keys]
    assert keys in (OLD, NEW)
    assert named.tokens == len(keys)
    return "old" if keys == OLD else "new"


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process that is not cleaned up after; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("old", [False, True])
def test_a_save_that_ends_at_any_system_call_leaves_the_old_checkpoint_or_none(
    tmp_path: Path, old: bool
) -> None:
    outcomes = set()
    for point in range(1, 61, 6):
        root = tmp_path / str(point)
        if old:
            save(root, OLD)
        left = point

        def die(name: str) -> Callable[..., Any]:
            call = getattr(os, name)

            def dying(*given: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left <= 0:
                    if name == "write":
                        call(given[0], given[1][: len(given[1]) // 2])
                    os._exit(9)
                return call(*given, **named)

            return dying

        def work(root: Path = root) -> None:
            for name in ("open", "write", "fsync", "replace", "close"):
                setattr(os, name, die(name))
            save(root, NEW)

        child = in_child(work)
        os.waitpid(child, 0)
        outcomes.add(judge(root, old=old))
    assert outcomes == {"new", "old" if old else "none"}


@pytest.mark.slow
def test_a_save_that_is_killed_at_200_random_moments_leaves_the_old_checkpoint_or_none(
    tmp_path: Path,
) -> None:
    draw, outcomes = random.Random(0), []
    begun = time.perf_counter()
    save(tmp_path / "timed", NEW)
    whole = time.perf_counter() - begun
    for point in range(200):
        root = tmp_path / str(point)
        old = point % 2 == 0
        if old:
            save(root, OLD)
        child = in_child(lambda root=root: save(root, NEW))  # type: ignore[misc]
        time.sleep(draw.uniform(0, 1.5 * whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcomes.append(judge(root, old=old))
    assert {"old", "new", "none"} == set(outcomes)


def test_sizes_follow_the_format() -> None:
    assert data_bytes(FORM, 3) == 3 * (4 + 16 + 6)
