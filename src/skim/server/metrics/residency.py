"""Metrics of residency: where each model's weights are, and their moves. The label `model` is its role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from skim.models.residency_state import Place, ResidencyState, Standing

Samples = Callable[[ResidencyState], Mapping[str, float]]

MODEL_GAUGES: tuple[tuple[str, str, str, Samples], ...] = (
    (
        "model_place",
        "1 if a model's weights are `resident` (on the device), `parked` or `released`, 0 otherwise.",
        "place",
        lambda s: {str(place): float(place is s.place) for place in Place},
    ),
    (
        "model_standing",
        "1 for the reason that a model is where it is: `ready`, `park_waits` (an administrator's park waits "
        "for running requests), `held` (by an administrator), `idle` or `policy`; 0 for the others.",
        "standing",
        lambda s: {str(one): float(one is s.standing) for one in Standing},
    ),
    (
        "model_bytes",
        "Bytes of a model's weights on the device, and of their copies in host memory and on disk.",
        "where",
        lambda s: {"device": s.device_bytes, "host": s.host_bytes, "disk": s.disk_bytes},
    ),
)
MODEL_COUNTERS: tuple[tuple[str, str, str, Samples], ...] = (
    (
        "model_transfers",
        "Moves of a model's weights, by direction.",
        "direction",
        lambda s: {str(way): done.count for way, done in s.transfers.items()},
    ),
    (
        "model_transfer_bytes",
        "Bytes copied by these moves.",
        "direction",
        lambda s: {str(way): done.bytes for way, done in s.transfers.items()},
    ),
    (
        "model_transfer_seconds",
        "Time of these moves, in seconds.",
        "direction",
        lambda s: {str(way): done.seconds for way, done in s.transfers.items()},
    ),
)
"""Rows of (name, help text, label, value by label), for each model."""


def residency_metrics(
    states: Sequence[ResidencyState], labels: Sequence[str], values: Sequence[str]
) -> Iterator[Metric]:
    """The metrics of these models, with more `labels` that have the same `values` in all."""
    for kind, rows in ((GaugeMetricFamily, MODEL_GAUGES), (CounterMetricFamily, MODEL_COUNTERS)):
        for name, text, label, samples in rows:
            family = kind(f"skim:{name}", text, labels=(*labels, "model", label))
            for state in states:
                for key, value in sorted(samples(state).items()):
                    family.add_metric([*values, state.role, key], value)
            yield family
