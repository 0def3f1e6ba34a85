"""Every launch of the CUDA backend passes the first stage of Triton's compiler, on a machine without a GPU.

The interpreter runs kernels as Python, so it accepts types and shapes that the compiler refuses.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)
triton = pytest.importorskip("triton")

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from skim.attention.cuda.backend import TritonBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.formats import FORMATS
from skim.memory.store import LayerShape
from tests.pools import make_pool

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
TARGET = GPUTarget("cuda", 90, 32)


def type_of(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


class Recorder:
    """Stands for the launch of any kernel: compiles it to Triton's own language, and runs nothing."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def run(self, kernel: Any, *args: object, grid: object, warmup: bool, **named: object) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        types = {name: type_of(one) for name, one in zip(kernel.arg_names, args, strict=False)}
        types |= dict.fromkeys(named, "constexpr")
        source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in named.items()})
        backend = make_backend(TARGET)
        parsed = backend.parse_options(options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parts = backend.get_codegen_implementation(parsed), backend.get_module_map()
        assert source.make_ir(TARGET, parsed, *parts, context).verify()
        self.kernels.append(kernel.__name__)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: made.run(self, *args, **named))
    return made


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [(128, 4, torch.bfloat16), (96, 3, torch.bfloat16), (64, 16, torch.float16), (128, 1, torch.float32)],
)
def test_launches_of_a_mixed_step(
    kv_format: str, dim: int, group: int, dtype: torch.dtype, recorder: Recorder
) -> None:
    pool = make_pool(LayerShape(2, dim, dim), 16, 24, 24, dtype, kv_format=kv_format)
    rows = (Row(Role.DECODE, range(8), 120, 1), Row(Role.PREFILL, range(8, 16), 70, 40))
    step = Step(pool, rows, TritonBackend())
    query, key, value = (torch.randn(41, heads, dim).to(dtype) for heads in (2 * group, 2, 2))
    for softcap in (None, 3.0):
        step.attend(0, query, key, value, AttentionCall(0.1, softcap=softcap))
    coded = {
        "write_codes_kernel",
        "decode_kernel",
        "merge_turned_kernel",
        "restore_kernel",
        "turn_back_kernel",
    }
    wanted = {"write_kernel"} if kv_format == "auto" else coded
    assert set(recorder.kernels) - {"merge_kernel"} == wanted | {"attend_kernel"}
