"""Layers on the host: the last decoder layers of a model come to the device one ahead of the forward.

So a model may be larger than the card. Two of these layers are on the device at a time: while one computes,
the next is copied on a side stream into the memory that the one before it has left. A forward takes as long
as the slower of both, so long chunks of a prompt hide the copies, and a decode step takes as long as copying
all of these layers. Between forwards none of them is on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from skim.config import ModelConfig
from skim.errors import ConfigError, ModelError
from skim.memory.budget import TENSOR_ROUNDING
from skim.models.around import run_around
from skim.models.forwards.packed import pack_products
from skim.models.storages import Storages, wait_for

SMALL = 2**20  # smaller tensors share an allocation


def layers_of(module: Any) -> list[Any]:
    """The decoder layers, in their order."""
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def layers_to_offload(sizes: Sequence[int], room: int, reserve: int = 0) -> int:
    """The fewest last layers that must be on the host for the others to fit `room` bytes.

    `sizes` are those of all layers. `reserve` is needed besides if all layers are on the device.
    """
    if sum(sizes) + reserve <= room:
        return 0
    fitting = sum(total <= room for total in accumulate(sizes))
    return max(1, len(sizes) - fitting)


def check_offload(config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError if layers are to be on the host, and the device is none that they could leave."""
    if config.layers_on_host != 0 and device.type != "cuda":
        raise ConfigError(
            f"offload_layers {config.offload_layers} needs a GPU, and the device is {device}: its layers are "
            "in host memory already; leave it out",
            fields="offload_layers",
        )


class HostLayers:
    """The decoder layers of a model, the last `count` of them on the host. Used by one thread at a time.

    While the model is loaded, each layer is added as soon as its weights are on the device, so the device
    never holds all of them.
    """

    def __init__(self, resident: int, *, pack: bool = True) -> None:
        """`resident`: the first layers, which stay on the device. `pack`: pack the products of layers, as
        their faster forwards would do later, when the weights are not there."""
        self._resident = resident
        self._pack = pack
        self._layers: list[Storages] = []
        self._sizes: list[int] = []
        self._places: dict[int, int] = {}  # the layer of each storage
        self._present: set[int] = set()  # layers on the host that are on the device now, too
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def wanted(cls, config: ModelConfig, device: torch.device, total: int) -> HostLayers | None:
        """What a model with `total` layers needs to be loaded with these settings; None for nothing."""
        count = config.layers_on_host
        if count == 0:
            return None
        check_offload(config, device)
        if count is not None and count > total:
            raise ConfigError(
                f"offload_layers {count} is more than the {total} layers of the model; use {total} or auto",
                fields="offload_layers",
            )
        return cls(0 if count is None else total - count, pack=not config.enforce_eager)

    @property
    def count(self) -> int:
        """Layers on the host."""
        return len(self._layers) - self._resident

    @property
    def sizes(self) -> list[int]:
        """Bytes that each layer takes on the device, as its allocator rounds them."""
        return self._sizes

    @property
    def host_bytes(self) -> int:
        return sum(storages.host_bytes for storages in self._layers[self._resident :])

    @property
    def storages(self) -> list[Storages]:
        """Those of the layers on the host."""
        return self._layers[self._resident :]

    def add(self, layer: Any) -> None:
        """Take the next layer, whose weights are on the device."""
        index = len(self._layers)
        if self._pack:
            pack_products(layer)
        storages = Storages.of(layer)
        tensors = [*layer.parameters(), *layer.buffers()]
        large = sum(tensor.nbytes >= SMALL for tensor in tensors)
        self._sizes.append(storages.bytes + (large + 1) * TENSOR_ROUNDING)  # the small ones share one
        self._places |= {_identity(tensor): index for tensor in tensors}
        if index >= self._resident:
            storages.keep_host_copy()
            storages.free()
        self._layers.append(storages)
        run_around(layer, partial(self._before, index), partial(self._after, index))

    def finish(self, module: Any, name: str) -> None:
        """All layers were added. Raises ModelError if one shares weights with another part of the module."""
        parts = layers_of(module)
        owners = [(tensor, index) for index, layer in enumerate(parts) for tensor in _tensors(layer)]
        inside = {id(tensor) for tensor, _ in owners}
        owners += [(tensor, -1) for tensor in _tensors(module) if id(tensor) not in inside]
        for tensor, owner in owners:
            if self._places.get(_identity(tensor), owner) != owner:
                raise ModelError(
                    f"{name}: its layers share weights with each other, so they cannot be on the host; "
                    "leave offload_layers out"
                )
        module.base_model.register_forward_hook(lambda *_: self.rest(), always_call=True)

    def keep(self, count: int) -> None:
        """Have the last `count` layers on the host, and the others on the device.

        Layers move one by one. If memory runs out, those that have moved stay where they are.
        """
        self.rest()
        resident = max(0, len(self._layers) - count)
        while self._resident > resident:
            storages = self._layers[self._resident - 1]
            storages.keep_host_copy()
            storages.free()
            self._resident -= 1
        while self._resident < resident:
            storages = self._layers[self._resident]
            storages.fill()
            storages.drop_host_copy()
            self._resident += 1

    def bring(self, tensor: torch.Tensor) -> None:
        """Have the layer of this tensor on the device until the next call, or `rest`."""
        index = self._places.get(_identity(tensor), -1)
        if index >= self._resident and index not in self._present:
            self.rest()
            self._fill(index)

    def rest(self) -> None:
        """Free what a forward left on the device: the next layer, if it ended early."""
        for index in list(self._present):
            self._free(index)

    # -- around each layer's call

    def _before(self, index: int) -> None:
        """Wait for this layer, and start to copy the next one."""
        wanted = range(max(index, self._resident), min(index + 2, len(self._layers)))
        if not wanted:
            return
        for other in self._present.difference(wanted):
            self._free(other)
        if self._stream is None and self._layers[wanted[0]].device.type == "cuda":
            self._stream = torch.cuda.Stream(self._layers[wanted[0]].device)  # type: ignore[no-untyped-call]
        filled = [self._fill(one, self._stream) for one in wanted]
        if wanted[0] == index and (ready := filled[0]) is not None:
            wait_for(ready, self._layers[index].device)

    def _after(self, index: int) -> None:
        if index in self._present:
            self._free(index)

    def _fill(self, index: int, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
        filled = self._layers[index].fill(stream)
        self._present.add(index)
        return filled

    def _free(self, index: int) -> None:
        self._layers[index].free()
        self._present.remove(index)


def _tensors(module: Any) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
