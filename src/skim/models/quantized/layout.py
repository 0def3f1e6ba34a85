"""How a kind of checkpoint stores its coded weights: the contract, and what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from skim.errors import ModelError, shown
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.packed import fit_group, sort_groups
from skim.models.quantized.shards import Shards
from skim.models.remedy import remedy

FLOAT_TYPES = ("F16", "BF16", "F32")
ACTIVATIONS = {  # scales of activations and of the KV cache, which Skim does not round with
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("activation_scale", "q_scale", "k_scale", "v_scale", "prob_scale"),
}


class Layout(ABC):
    """Finds the coded weights of a checkpoint and reads them, one at a time."""

    format: ClassVar[str]
    """The `quant_method` in config.json."""
    marks: ClassVar[tuple[str, ...]]
    """A module with a tensor of one of these endings has a coded weight."""
    endings: ClassVar[tuple[str, ...]]
    """Other tensors of such a module. None of them is a weight of the plain model."""

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        self.shards, self.settings = shards, settings
        marked = (name.rpartition(".") for name in shards.names)
        self.modules = {
            module for module, _, ending in marked if ending in self.marks and self.marked(module, ending)
        }
        """Names of modules with a coded weight, such as `model.layers.0.mlp.up_proj`."""
        for name in sorted(shards.names):
            module, _, ending = name.rpartition(".")
            if ending in self.endings and module not in self.modules:
                raise shards.wrong(name, f"there is no {self.format} weight beside it")

    def marked(self, module: str, ending: str) -> bool:
        """True if a tensor with the ending of a mark is one."""
        return True

    def mark(self, module: str) -> str:
        """The ending of the tensor that marks the module."""
        return next(ending for ending in self.marks if self.has(module, ending))

    def parts(self) -> set[str]:
        """The tensors that are no weights of the plain model."""
        every = {*self.marks, *self.endings}
        found = {f"{module}.{ending}" for module in self.modules for ending in every}
        unused = {name for name in self.shards.names if name.rpartition(".")[2] in ACTIVATIONS}
        return found & self.shards.names | unused

    @abstractmethod
    def read(self, module: str) -> CodedWeight:
        """The module's weight. Planes need not be checked."""

    # -- for readers

    def has(self, module: str, ending: str) -> bool:
        return f"{module}.{ending}" in self.shards

    def part(
        self, module: str, ending: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]
    ) -> torch.Tensor:
        """A tensor of a module, of one of these types and of this shape, where None is any size."""
        tensor = f"{module}.{ending}"
        if tensor not in self.shards:
            raise ModelError(
                f"{self.shards.name}: the {self.format} weight {module} lacks the tensor {tensor}; "
                f"{remedy(self.shards.path)}"
            )
        dtype, found = self.shards.dtype(tensor), self.shards.shape(tensor)
        if dtype not in dtypes:
            raise self.shards.wrong(tensor, f"its type is {dtype}, not {' or '.join(dtypes)}")
        fits = len(found) == len(shape) and all(
            wanted is None or wanted == size for wanted, size in zip(shape, found, strict=True)
        )
        if not fits or 0 in found:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.shards.wrong(tensor, f"its shape is {list(found)}, not [{wanted}]")
        return self.shards.tensor(tensor)

    def given_group(self, module: str, columns: int, size: int) -> int:
        """The columns of a group by the config; -1 or 0 is all of them."""
        size = columns if size in (-1, 0) else size
        if size < 1 or columns % size:
            raise self.refused(f"groups of {size} for the {columns} columns of {module}")
        return size

    def even_groups(self, module: str, ending: str, columns: int, groups: int) -> int:
        """The columns of a group, if there are so many groups."""
        if columns % groups:
            raise self.shards.wrong(
                f"{module}.{ending}", f"it has scales for {groups} groups of {columns} columns"
            )
        return columns // groups

    def group(self, module: str, columns: int, given: int) -> int:
        """The group of the coded weight."""
        group = fit_group(columns, given)
        if group is None:
            raise self.refused(f"groups of {given} for the {columns} columns of {module}")
        return group

    def sorted_groups(
        self, module: str, ending: str, index: torch.Tensor, groups: int
    ) -> torch.Tensor | None:
        """`sort_groups`, or an error."""
        order = sort_groups(index, groups)
        if isinstance(order, str):
            raise self.shards.wrong(f"{module}.{ending}", f"it has {order}")
        return order

    def setting(self, key: str, default: Any, *kinds: type, of: Mapping[str, Any] | None = None) -> Any:
        """A setting of the quantization, of one of these types."""
        value = (self.settings if of is None else of).get(key, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.refused(f"{key} {shown(value)}")
        return value

    def refused(self, what: str) -> ModelError:
        """The error for a variant that Skim does not read."""
        return ModelError(
            f"{self.shards.name}: its quantization_config has {what}, which Skim does not read for "
            f"{self.format}; use a checkpoint in another quantization, or the unquantized model"
        )
