"""Storages: memory that is freed and filled under tensors, whatever aliases them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from skim.models import scratch
from skim.models.forwards.lean import lean_layers
from skim.models.quantized.build import quantize_module
from skim.models.scratch import HostCopy, ScratchFile
from skim.models.storages import Storages, own
from tests import tiny

CPU = torch.device("cpu")


def model(kind: str, seed: int) -> Any:
    """A tiny model: plain, with tied tables, with lean layers over packed products, or with coded planes."""
    torch.manual_seed(seed)
    module = tiny.with_our_attention("qwen2" if kind == "packed" else "llama").requires_grad_(False)
    if kind == "tied":
        module.lm_head.weight = module.model.embed_tokens.weight
    if kind in ("int8", "int4"):
        module = quantize_module(module, CPU, kind)
    if kind != "plain":
        assert lean_layers(module) == 4
    return module


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))


@pytest.mark.parametrize("kind", ["plain", "tied", "packed", "int8", "int4"])
def test_a_model_computes_the_same_after_any_sequence_of_copies_frees_and_fills(kind: str) -> None:
    draw = random.Random(kind)
    module = model(kind, seed=1)
    aliases = [one.detach()[..., :3] for one in (*module.parameters(), *module.buffers()) if one.dim() == 2]
    copies = [one.clone() for one in aliases]
    few, many = tiny.logits(module, 5), tiny.logits(module, 40)
    storages, file = Storages.of(module), ScratchFile()
    filler: list[torch.Tensor] = []
    for _ in range(12):
        for action in draw.choices([storages.keep_host_copy, storages.drop_host_copy], k=2):
            action()
        storages.keep_file_copy(file)
        storages.free()
        assert storages.addresses == (0,) * len(storages.addresses)
        assert not any(one.untyped_storage().nbytes() for one in (*module.parameters(), *module.buffers()))
        filler.append(torch.randn(draw.randrange(1, 20_000)))  # so that addresses change
        draw.choice([storages.keep_host_copy, storages.drop_host_copy])()
        storages.fill()
        assert all(torch.equal(one, copy) for one, copy in zip(aliases, copies, strict=True))
        assert torch.equal(tiny.logits(module, 5), few)
        assert torch.equal(tiny.logits(module, 40), many)
    assert file.bytes == storages.bytes == storages.disk_bytes


def test_tied_weights_count_once_and_layers_are_disjoint() -> None:
    module = model("tied", seed=2)
    layers = [Storages.of(layer) for layer in module.model.layers]
    rest = Storages.of(module, without=layers)
    whole = Storages.of(module)
    assert whole.bytes == rest.bytes + sum(one.bytes for one in layers)
    assert sorted(whole.addresses) == sorted(a for one in (*layers, rest) for a in one.addresses)
    assert rest.bytes < 2 * module.lm_head.weight.nbytes + 10_000


def test_weights_that_cannot_be_resized_are_copied_and_stay_tied() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(24.0)
            base.numpy()  # torch never resizes this storage again
            self.first = nn.Parameter(base[:12].view(3, 4), requires_grad=False)
            self.second = nn.Parameter(base[8:].view(4, 4).t(), requires_grad=False)
            self.register_buffer("hidden", base[4:6], persistent=False)

    module = Two()
    before = [one.clone() for one in (module.first, module.second, module.hidden)]  # type: ignore[operator]
    own(module)
    module.first.view(-1)[4] = before[2][0] = before[0].view(-1)[4] = 99.0
    assert all(
        torch.equal(a, b)
        for a, b in zip((module.first, module.second, module.hidden), before, strict=True)  # type: ignore[arg-type]
    )
    storages = Storages.of(module)
    assert len(storages.addresses) == 1
    assert storages.bytes == 96
    storages.keep_file_copy(ScratchFile())
    storages.free()
    storages.fill()
    assert torch.equal(module.second, before[1])


def test_memory_without_a_copy_is_not_freed_and_a_failed_fill_frees_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model("plain", seed=3)
    expected = tiny.logits(module, 9)
    storages, file = Storages.of(module), ScratchFile()
    with pytest.raises(AssertionError, match="without a copy"):
        storages.free()
    storages.keep_file_copy(file)
    storages.free()
    for place in range(0, len(storages.addresses), 7):
        reads = iter(range(place))
        with monkeypatch.context() as broken:
            read = ScratchFile.read

            def fail(self: ScratchFile, *args: Any, reads: Any = reads, read: Any = read) -> None:
                if next(reads, None) is None:
                    raise OSError("the disk is gone")
                read(self, *args)

            broken.setattr(ScratchFile, "read", fail)
            with pytest.raises(OSError, match="disk is gone"):
                storages.fill()
        assert not storages.resident
        assert not any(storages.addresses)
    storages.fill()
    assert torch.equal(tiny.logits(module, 9), expected)


def test_a_failed_write_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile()
    first = torch.arange(100, dtype=torch.uint8)
    assert file.append([first, first[:7]]) == [0, 100]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as broken:
            broken.setattr(scratch.os, name, full)
            with pytest.raises(OSError, match="No space"):
                file.append([first] * 3)
        assert file.bytes == 107
    assert file.append([first]) == [107]
    for start in (0, 107):
        read = torch.zeros(100, dtype=torch.uint8)
        file.read(start, read)
        assert torch.equal(read, first)
    with pytest.raises(OSError, match="ends at"):
        file.read(200, torch.zeros(100, dtype=torch.uint8))


def test_systems_that_cannot_reserve_space_write_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no posix_fallocate."""
    monkeypatch.delattr(scratch.os, "posix_fallocate", raising=False)
    file, read = ScratchFile(), torch.zeros(100, dtype=torch.uint8)
    assert file.append([torch.arange(100, dtype=torch.uint8)]) == [0]
    file.read(0, read)
    assert torch.equal(read, torch.arange(100, dtype=torch.uint8))


def test_parts_of_a_host_copy_are_aligned_and_do_not_overlap() -> None:
    copy = HostCopy([1, 700, 3, 512], pinned=False)
    starts = [part.data_ptr() for part in copy.parts]
    assert [len(part) for part in copy.parts] == [1, 700, 3, 512]
    assert [start - starts[0] for start in starts] == [0, 512, 1536, 2048]
    assert copy.bytes == 2560
