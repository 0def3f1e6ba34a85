"""Sampling defaults that a model's authors recommend, from its `generation_config.json`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from skim.errors import RequestError
from skim.sampling.params import SamplingParams

log = logging.getLogger(__name__)

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """The fields of `SamplingParams` that the file sets. An unusable value is logged and left out."""
    path = directory / "generation_config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so it sets no sampling defaults: %s", path.name, error)
        return {}
    found: dict[str, Any] = {}
    for name in NAMES:
        value = given.get(name) if isinstance(given, dict) else None
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            found[name] = value
        except RequestError as error:
            log.warning("%s: %s; Skim's default is used", path.name, error)
    if found:
        shown = ", ".join(f"{name} {value}" for name, value in found.items())
        log.info("sampling defaults of the model: %s (generation_config none turns them off)", shown)
    return found
