"""Build a transformers module whose matrices are coded, one tensor at a time.

The module is made without weights. Then every weight is read, quantized if it is to be, moved to the device
and put in its place, before the next one is read. So memory never holds more than the model and one weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from skim.errors import ModelError
from skim.models.offload import HostLayers, layers_of
from skim.models.overflow import check_codes, convert
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.module import CodedEmbedding, CodedLinear
from skim.models.quantized.quantize import can_quantize, quantize

HEAD = "int8"  # of the output head when weights are quantized while loading: its errors show at once


class Weights(Protocol):
    """The weights of a model, by their names in its state dict."""

    def names(self) -> set[str]: ...

    def is_coded(self, name: str) -> bool:
        """True if the weight is stored as codes."""
        ...

    def coded(self, name: str) -> CodedWeight: ...

    def plain(self, name: str) -> torch.Tensor: ...


class Mismatch(ModelError):
    """The names or shapes of the weights are not those of the module."""


def build_module(
    make: Callable[[], Any],
    weights: Weights,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    host: HostLayers | None = None,
) -> Any:
    """Make a module and fill it. `make` builds it with transformers; its parameters are never allocated.

    `quantization` is "auto" (codes stay codes), "none" (codes are restored), or a format for every matrix of
    the layers, with `HEAD` for the output head. A table of embeddings is looked up, not multiplied: it stays
    plain unless it is coded in the file, or tied to the head. Layers are filled last, and each is added to
    `host` before the next one is filled.
    """
    with _without_parameters():
        module = make()
    module.eval().requires_grad_(False)
    filler = _Filler(module, weights, name, device, dtype, quantization)
    filler.check()
    head = module.get_output_embeddings()  # first, while the device is empty: it is the largest matrix
    for layer, parts in by_layer(module):
        for path, part in sorted(parts, key=lambda found: found[1] is not head):
            filler.fill(path, part)
        if layer is not None and host is not None:
            _move_buffers(layer, device)
            host.add(layer)
    filler.tie()
    _move_buffers(module, device)
    return module


def _move_buffers(module: Any, device: torch.device) -> None:
    """Move buffers that no file holds, such as rotary frequencies."""
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[key] = buffer.to(device)


def by_layer(module: Any) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """The parts of a module with their paths: first those outside of decoder layers, with None, then those
    of each layer with the layer. The largest parts come first, when most of the device's memory is free."""
    paths = {part: path for path, part in module.named_modules()}
    layers = [(layer, [(paths[part], part) for part in layer.modules()]) for layer in layers_of(module)]
    inside = {part for _, parts in layers for _, part in parts}
    outside = [(path, part) for part, path in paths.items() if part not in inside]
    return [(None, outside), *layers]


def quantize_module(
    module: Any, device: torch.device, quantization: str, host: HostLayers | None = None
) -> Any:
    """Quantize the matrices of a module with weights in place, and move it to the device, part by part."""
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = getattr(head, "weight", None) is getattr(table, "weight", ())
    for layer, parts in by_layer(module):
        for path, part in parts:
            if type(part) is nn.Linear and can_quantize(part.weight.shape):
                how = HEAD if part is head else quantization
                coded = quantize(part.weight.detach(), how, f"{path}.weight", device=device)
                bias = None if part.bias is None else part.bias.detach().to(device)
                put(module, path, CodedLinear(coded, bias))
                if part is head and is_tied and is_table(table):
                    [place] = [one for one, other in module.named_modules() if other is table]
                    put(module, place, coded_table(table, coded, part.weight.dtype))
        if layer is not None and host is not None:
            host.add(layer.to(device))
    return module.to(device)


def is_table(part: Any) -> bool:
    """True for an embedding table that `CodedEmbedding` can stand for."""
    scaled = isinstance(part, nn.Embedding) and hasattr(part, "embed_scale")
    return type(part) is nn.Embedding or scaled


def coded_table(table: Any, coded: CodedWeight, dtype: torch.dtype) -> CodedEmbedding:
    """A coded table in the place of this one."""
    scale = getattr(table, "embed_scale", None)
    return CodedEmbedding(coded, dtype, None if scale is None else float(scale))


def put(module: Any, path: str, part: nn.Module) -> None:
    """Replace the part at `path`."""
    owner, _, key = path.rpartition(".")
    setattr(module.get_submodule(owner), key, part.eval())


class _Filler:
    """Fills one module."""

    def __init__(
        self,
        module: Any,
        weights: Weights,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str,
    ) -> None:
        self._module, self._weights, self._name = module, weights, name
        self._device, self._dtype, self._quantization = device, dtype, quantization
        self._expected: dict[str, torch.Size] = {
            key: value.shape for key, value in module.state_dict().items()
        }
        ties: dict[str, str] = dict(module.all_tied_weights_keys)
        self._ties = {target: source for target, source in ties.items() if self._is_tied(target, source)}
        head = module.get_output_embeddings()
        self._heads = {f"{path}.weight" for path, part in module.named_modules() if part is head}

    def _is_tied(self, target: str, source: str) -> bool:
        """True if the files lack the target, or have the same values for it as for its source."""
        present = self._weights.names()
        if target not in present or source not in present:
            return target not in present
        one, other = (self._value(name) for name in (target, source))
        return one.shape == other.shape and torch.equal(one, other)

    def check(self) -> None:
        """Raise a `Mismatch` if a weight is missing, unless it is tied to another."""
        missing = sorted(self._expected.keys() - self._weights.names() - self._ties.keys())
        if missing:
            raise Mismatch(
                f"{self._name}: its weight files lack {len(missing)} tensors, first {missing[0]}; "
                "the files do not match its config.json"
            )

    def fill(self, path: str, part: Any) -> None:
        """Give a part the weights that it holds itself."""
        for key in [*part._parameters, *part._buffers]:
            name = f"{path}.{key}" if path else key
            if name not in self._expected or name in self._ties:
                continue
            coded = self._coded(name, part) if key == "weight" else None
            if coded is None:
                value = self._plain(name)
                if key in part._parameters:
                    part._parameters[key] = nn.Parameter(value, requires_grad=False)
                else:
                    part._buffers[key] = value
            elif isinstance(part, nn.Linear):
                bias = self._plain(f"{path}.bias") if part.bias is not None else None
                put(self._module, path, CodedLinear(coded, bias))
                return
            else:
                put(self._module, path, coded_table(part, coded, self._dtype))
                return

    def tie(self) -> None:
        """Let tied weights share what their source has."""
        for target, source in self._ties.items():
            path, _, key = target.rpartition(".")
            owner = self._module.get_submodule(source.rpartition(".")[0])
            part = self._module.get_submodule(path)
            if isinstance(owner, CodedEmbedding):
                put(self._module, path, CodedLinear(owner.coded, part.bias))
            else:
                setattr(part, key, getattr(owner, source.rpartition(".")[2]))

    def _coded(self, name: str, part: Any) -> CodedWeight | None:
        """The codes of a matrix, or None if it stays plain."""
        if not (type(part) is nn.Linear or is_table(part)):
            return None
        quantization = self._quantization
        if quantization in ("auto", "none"):
            if quantization == "none" or not self._weights.is_coded(name):
                return None
            coded = self._weights.coded(name)
            self._check_shape(name, (coded.rows, coded.columns))
            coded = coded.to(self._device)
            check_codes(coded, self._dtype, f"{self._name}: {name}")
            return coded
        tied_to_head = any(source == name and target in self._heads for target, source in self._ties.items())
        if (is_table(part) and not tied_to_head) or not can_quantize(self._expected[name]):
            return None
        how = HEAD if is_table(part) or name in self._heads else quantization
        value = self._value(name)
        self._check_shape(name, tuple(value.shape))
        dtype = self._dtype if value.is_floating_point() else value.dtype
        return quantize(value, how, f"{self._name}: {name}", device=self._device, dtype=dtype)

    def _plain(self, name: str) -> torch.Tensor:
        """The values, in the model's dtype and on its device. Integers keep their dtype.

        Raises ModelError for a finite value that is infinite in this dtype.
        """
        value = self._value(name)
        self._check_shape(name, tuple(value.shape))
        dtype = self._dtype if value.is_floating_point() else value.dtype
        return convert(value, self._device, dtype, f"{self._name}: {name}")

    def _value(self, name: str) -> torch.Tensor:
        """The values as the file has them."""
        weights = self._weights
        return weights.coded(name).restore() if weights.is_coded(name) else weights.plain(name)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != tuple(self._expected[name]):
            raise Mismatch(
                f"{self._name}: {name} has the shape {list(shape)} in its weight files, not "
                f"{list(self._expected[name])}; the files do not match its config.json"
            )


_patching = threading.Lock()


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Within this context, parameters of modules that this thread makes have no memory.

    Buffers have: they are computed.
    """
    owner = threading.get_ident()
    with _patching:
        register = nn.Module.register_parameter

        def to_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and threading.get_ident() == owner:
                parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            register(self, name, parameter)

        nn.Module.register_parameter = to_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
