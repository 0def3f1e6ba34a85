"""Run code before and after a layer, outside of its compiled forward.

A hook is compiled together with its layer, and torch ignores one that is added after that. So the layer gets
a class that differs only in being called, whatever forward it has then: transformers' own, a lean or a
compiled one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def run_around(layer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around every call of the layer. `after` is called if anything fails, too."""
    kind: Any = type(layer)
    layer.skim_around = before, after
    layer.__class__ = _with_calls_around(kind)


@cache
def _with_calls_around(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, after = self.skim_around
        try:
            before()
            return kind.__call__(self, *args, **kwargs)
        finally:
            after()

    made: Any = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    if "forward" in vars(made):  # transformers wraps the forward of every new class of layers once more
        del made.forward
    return made
