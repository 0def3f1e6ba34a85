"""Finds weights that are finite in their file and infinite in the model's dtype.

float16 ends at 65504. A larger weight becomes infinite when it is converted, and the model then writes
nonsense or fails at a later token. So loading names the weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skim.errors import ModelError
from skim.models.quantized.checks import largest
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.shards import Shards


def can_overflow(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """True if a finite value of the first type may be infinite in the second."""
    floats = stored.is_floating_point and dtype.is_floating_point
    return floats and torch.finfo(stored).max > torch.finfo(dtype).max


def convert(value: torch.Tensor, device: torch.device, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values in another type, on the device. Raises ModelError if a finite one becomes infinite."""
    found = value.to(device, dtype)
    if can_overflow(value.dtype, dtype) and value.numel() and not _finite([found])[0]:
        _refuse_overflow(value, found, name)
    return found


def check_codes(weight: CodedWeight, dtype: torch.dtype, name: str) -> None:
    """Raise ModelError if a value that the codes stand for is infinite in the dtype."""
    if can_overflow(torch.float32, dtype) and largest(weight) > torch.finfo(dtype).max:
        convert(weight.restore(), weight.device, dtype, name)


def check_converted(module: Any, path: Path, name: str, dtype: torch.dtype) -> None:
    """Raise ModelError if a finite weight of the files in `path` is infinite in the module.

    The module is read once, on its device, if a type in the files can overflow. A file is read again only
    for a weight that is not finite.
    """
    files = Shards(path, name)
    if not any(can_overflow(stored, dtype) for stored in files.floats()):
        return
    by_name = sorted(module.state_dict().items(), key=lambda item: item[0] in files)
    once = {one.data_ptr(): (key, one) for key, one in by_name}  # of tied weights, a name in the files
    loaded = [(key, one) for key, one in once.values() if one.is_floating_point() and one.numel()]
    for (key, one), finite in zip(loaded, _finite([one for _, one in loaded]), strict=True):
        if finite:
            continue
        if key not in files or files.shape(key) != tuple(one.shape):  # transformers has renamed or merged it
            raise _error(f"{name}: {key}", "values that are not finite", one.dtype)
        _refuse_overflow(files.tensor(key), one, f"{name}: {key}")


def _finite(values: list[torch.Tensor]) -> list[bool]:
    """True for each tensor, none of them empty, without infinity and NaN. A device is waited for once."""
    ends = [torch.stack(one.aminmax()).float() for one in values]
    found: list[bool] = torch.stack(ends).isfinite().all(1).tolist() if ends else []
    return found


def _refuse_overflow(stored: torch.Tensor, found: torch.Tensor, name: str) -> None:
    """Raise if a finite value has become infinite. Values that are not finite in the file are left alone."""
    lost = stored.isfinite() & ~found.to(stored.device).isfinite()
    if bool(lost.any()):
        largest = float(stored[lost].abs().max())
        raise _error(name, f"values up to {largest:.6g}", found.dtype)


def _error(name: str, values: str, dtype: torch.dtype) -> ModelError:
    kind = str(dtype).removeprefix("torch.")
    wider = [one for one in ("bfloat16", "float32") if can_overflow(getattr(torch, one), dtype)]
    remedy = (
        f"use --dtype {' or '.join(wider)} (--drafter-dtype for a drafter)" if wider else "use other weights"
    )
    return ModelError(f"{name} has {values}, but {kind} ends at {torch.finfo(dtype).max:.6g}; {remedy}")
