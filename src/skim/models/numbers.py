"""Checks the numbers of a config.json before any other code uses them.

transformers checks few of them: a negative count fails deep inside with an error that names nothing, and a
huge one makes it build lists without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skim.errors import ModelError, shown

LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1 << 31),
    "vocab_size": 1 << 24,
}
"""The largest value of each number, far beyond any model. The smallest is 1; null and absent are fine."""

_MOST_NESTED = 8


def check_numbers(config: Path, name: str, remedy: str) -> None:
    """Raise a ModelError for a number of config.json that no model can have.

    Files that are not JSON, and values of other types, are left to transformers.
    """
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for field, value in _numbers(settings):
        if not 1 <= value <= LIMITS[field.rpartition(".")[2]]:
            raise ModelError(
                f"{name}: {field} in its config.json must be a whole number from 1 to "
                f"{LIMITS[field.rpartition('.')[2]]}, got {shown(value)}; {remedy}"
            )


def _numbers(settings: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """The numbers that have limits, by field; those of nested configs as `text_config.hidden_size`."""
    if not isinstance(settings, Mapping) or depth > _MOST_NESTED:
        return
    for field, value in settings.items():
        if field in LIMITS and isinstance(value, int) and not isinstance(value, bool):
            yield prefix + field, value
        elif isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{field}.", depth + 1)
