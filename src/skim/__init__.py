"""Skim: a long-context LLM inference engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skim import cpu as cpu  # before torch, which reads the variables that it sets
from skim.version import __version__

if TYPE_CHECKING:
    from skim.llm import LLM as LLM
    from skim.outputs import CompletionOutput as CompletionOutput
    from skim.outputs import RequestOutput as RequestOutput
    from skim.rendering import Rendering as Rendering
    from skim.sampling.grammar import Grammar as Grammar
    from skim.sampling.params import SamplingParams as SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Grammar",
    "Rendering",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


_HOMES = {
    "CompletionOutput": "skim.outputs",
    "Grammar": "skim.sampling.grammar",
    "Rendering": "skim.rendering",
    "RequestOutput": "skim.outputs",
    "SamplingParams": "skim.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when a name that needs them is accessed."""
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "skim.llm")), name)
    raise AttributeError(f"module 'skim' has no attribute {name!r}")
