"""The native decode kernel over codes: it writes what torch writes, and attends over what is stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.attention.backend import choose_backend
from skim.attention.cpu.native import NativeBackend, check
from skim.attention.cpu.native_codes import load_kernel, reads_codes
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall
from skim.memory.formats import make_stores
from skim.memory.store import LayerShape
from skim.native.build import NativeUnavailable
from tests.attention.test_native import SHAPE, Layer, two_threads

__all__ = ["two_threads"]
FORMATS = ("int8", "k8v4", "int4")


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    try:
        return NativeBackend(None, load_kernel())
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def expected(layer: Layer, index: int, call: AttentionCall) -> torch.Tensor:
    """Attention in float64 over a row's keys and values as they are stored. [heads, value_dim]"""
    row = layer.rows[index]
    runs = layer.pool.runs(row.blocks, row.first_slot(call.window), row.length)
    key, value = (t.double() for t in layer.pool.gather(0, runs))
    query = layer.query[index].double().view(key.shape[1], -1, key.shape[2])
    weights = torch.softmax(torch.einsum("kgd,nkd->kgn", query, key) * call.scale, dim=-1)
    return torch.einsum("kgn,nkd->kgd", weights, value).flatten(0, 1).float()


def planes(layer: Layer, row: int) -> dict[str, torch.Tensor]:
    """Codes and scales of a row's own slot."""
    [run] = layer.pool.runs(layer.rows[row].blocks, layer.rows[row].context, layer.rows[row].length)
    held = layer.pool.slabs[run.slab].layers[0].slots
    return {name: tensor[run.start].clone() for name, tensor in held.items()}


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes & 15, codes >> 4], dim=-1) if codes.dtype == torch.uint8 else codes


@settings(max_examples=120)
@given(
    kv_format=st.sampled_from(FORMATS),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.integers(1, 9),
    key_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256]),
    value_dim=st.sampled_from([None, None, None, 32, 64, 128]),
    block_size=st.sampled_from([1, 4, 16]),
    slab_blocks=st.sampled_from([1, 3, 40, 10**6]),
    lengths=st.lists(
        st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 600])), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, None, None, 31]),
    gaps=st.booleans(),
    sharpness=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_it_attends_over_what_is_stored_and_stores_what_torch_stores(
    native: NativeBackend,
    kv_format: str,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int | None,
    block_size: int,
    slab_blocks: int,
    lengths: list[int],
    window: int | None,
    gaps: bool,
    sharpness: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = LayerShape(kv_heads, key_dim, value_dim or key_dim)
    layer = Layer(
        shape, group, lengths, block_size=block_size, slab_blocks=slab_blocks, gaps=gaps, kv_format=kv_format
    )
    call = AttentionCall(sharpness * key_dim**-0.5, window=window)
    assert reads_codes(layer.pool.stores[0])
    out = layer.attend(native, call)
    assert torch.isfinite(out).all()
    for index in range(len(lengths)):
        torch.testing.assert_close(out[index], expected(layer, index, call), atol=3e-5, rtol=3e-5)
    written = [planes(layer, index) for index in range(len(lengths))]
    layer.attend(TorchBackend(), call)
    flipped = total = 0
    for index, ours in enumerate(written):
        for name, theirs in planes(layer, index).items():
            if name.endswith("scales"):  # equal, or neighbours where a sum is rounded the other way
                torch.testing.assert_close(ours[name].float(), theirs.float(), rtol=2**-7, atol=1e-6)
                continue
            apart = (nibbles(ours[name]).int() - nibbles(theirs).int()).abs()
            assert apart.max() <= 1
            flipped, total = flipped + int(apart.sum()), total + apart.numel()
    assert flipped <= 2 + total / 100


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_more_threads(
    native: NativeBackend, kv_format: str, two_threads: None
) -> None:
    layer = Layer(SHAPE, 3, [2000, 1, 700, 256], kv_format=kv_format)
    call = AttentionCall(0.125)
    together = layer.attend(native, call)
    torch.set_num_threads(1)
    assert torch.equal(together, layer.attend(native, call))
    rows, tensors = layer.rows, (layer.query, layer.key, layer.value)
    for i, row in enumerate(rows):
        layer.rows = [row]
        layer.query, layer.key, layer.value = (t[i : i + 1] for t in tensors)
        assert torch.equal(together[i : i + 1], layer.attend(native, call))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_non_finite_values_are_kept_and_stay_in_their_row(
    native: NativeBackend, kv_format: str, bad: float, place: str
) -> None:
    layer = Layer(SHAPE, 3, [50, 700, 50], kv_format=kv_format)
    getattr(layer, place)[1, 1, 5] = bad
    out = layer.attend(native, AttentionCall(0.125))
    broken = slice(1, 2) if place == "query" else slice(3, 6)  # one head, or the heads of one KV head
    assert out[1, broken].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()
    again = Layer(SHAPE, 3, [50], kv_format=kv_format)
    again.key[:] = 0
    again.value[:] = 0
    assert again.attend(native, AttentionCall(0.125)).isfinite().all()


def test_non_contiguous_tensors(native: NativeBackend) -> None:
    layer = Layer(SHAPE, 3, [100, 20, 300], kv_format="k8v4")
    call = AttentionCall(0.125)
    wanted = layer.attend(native, call)
    for name in ("query", "key", "value"):
        tensor = getattr(layer, name)
        setattr(layer, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(layer.attend(native, call), wanted)
    for name in ("query", "key", "value"):
        tensor = getattr(layer, name)
        setattr(layer, name, torch.stack([tensor, tensor], dim=-1)[..., 0])
    assert torch.equal(layer.attend(native, call), wanted)


def test_layers_that_it_does_not_read_are_left_to_torch(native: NativeBackend) -> None:
    """It knows no sinks and no softcaps, and half of a head of 24 is no whole vector of 4-bit codes."""
    for layer, call in (
        (Layer(SHAPE, 3, [40, 7], kv_format="int8"), AttentionCall(0.125, sinks=torch.randn(9))),
        (Layer(SHAPE, 3, [40, 7], kv_format="int8"), AttentionCall(0.125, softcap=5.0)),
        (Layer(LayerShape(2, 24, 24), 2, [40, 7], kv_format="int4"), AttentionCall(0.2)),
    ):
        assert torch.equal(layer.attend(native, call), layer.attend(TorchBackend(), call))


@pytest.mark.parametrize(
    ("kv_format", "dim", "reads"),
    [
        ("int8", 8, True),
        ("k8v4", 24, False),
        ("int4", 16, True),
        ("int4", 512, True),
        ("int8", 520, False),
        ("fp8", 64, False),
        ("auto", 64, False),
    ],
)
def test_the_stores_that_it_reads(kv_format: str, dim: int, reads: bool) -> None:
    [store] = make_stores([LayerShape(2, dim, dim)], torch.float32, kv_format)
    assert reads_codes(store) == reads


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_coded_pool_gets_the_kernel(native: NativeBackend, kv_format: str) -> None:
    pool = Layer(SHAPE, 3, [5], kv_format=kv_format).pool
    backend = choose_backend(pool)
    assert isinstance(backend, NativeBackend)
    assert backend._kernel(pool.stores[0], AttentionCall(1.0)) is not None


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_kernel_that_is_wrong_is_not_used(kv_format: str) -> None:
    class Wrong(TorchBackend):
        def attend(self, *arguments: object) -> torch.Tensor:
            return super().attend(*arguments) * 1.05  # type: ignore[arg-type]

    with pytest.raises(NativeUnavailable, match="differ"):
        check(Wrong(), SHAPE, kv_format)
