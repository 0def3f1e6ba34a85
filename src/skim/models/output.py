"""What a conversion shows and writes besides weights: progress on stderr, JSON files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def progress_bar(label: str, total: int, enabled: bool) -> Iterator[Callable[[int], object]]:
    """Count bytes on stderr: a bar on a terminal, one line elsewhere, nothing when not enabled."""
    if enabled and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(
            total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
        ) as bar:
            yield bar.update
        return
    if enabled:
        print(f"{label} ...", file=sys.stderr, flush=True)
    yield lambda _: None


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
