"""How many layers of a model stay on the host: as set, or the fewest that let the rest fit the device."""

from __future__ import annotations

import logging

from skim.config import ModelConfig
from skim.errors import ConfigError
from skim.memory.budget import GRAPH_RESERVE, in_words
from skim.models.load import LoadedModel
from skim.models.offload import layers_to_offload

log = logging.getLogger(__name__)


def place_layers(model: LoadedModel, config: ModelConfig) -> None:
    """Have as many layers on the host as set; all of them if that is to be chosen.

    An earlier engine over the same module may have placed them otherwise. Its next step drops its graphs,
    which have the addresses of its layers.
    """
    host, count = model.host_layers, config.layers_on_host
    if host is None and count != 0:
        raise ConfigError(
            f"{model.name} was loaded as a whole; load it with offload_layers {config.offload_layers}",
            fields="offload_layers",
        )
    if host is not None:
        model.residency.settle()  # layers that have just been unparked
        _keep(model, len(host.sizes) if count is None else count)


def graph_bytes(model: LoadedModel) -> int:
    """Bytes to reserve for CUDA graphs. Steps with layers on the host are not captured."""
    return 0 if model.layers_on_host else GRAPH_RESERVE


def fit_layers(model: LoadedModel, room: int) -> None:
    """Bring as many layers to the device as fit `room` bytes. All of them are on the host."""
    host = model.host_layers
    assert host is not None
    count = layers_to_offload(host.sizes, room, GRAPH_RESERVE)
    _keep(model, count)
    total = len(host.sizes)
    if not count:
        log.info("all %d layers of %s fit the device", total, model.name)
        return
    log.info(
        "%d of %d layers of %s stay on the host: %s is left for layers, and all of them take %s; every step "
        "copies %s",
        count,
        total,
        model.name,
        in_words(max(0, room)),
        in_words(sum(host.sizes)),
        in_words(sum(host.sizes[total - count :])),
    )


def _keep(model: LoadedModel, count: int) -> None:
    assert model.host_layers is not None
    with model.residency.lock:  # between the steps of another engine
        before = model.layers_on_host
        try:
            model.host_layers.keep(count)
        finally:
            model.residency.recount()
            model.residency.relocations += model.layers_on_host != before
