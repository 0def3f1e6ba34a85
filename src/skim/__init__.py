"""Skim: a long-context LLM inference engine."""

from typing import TYPE_CHECKING, Any

from skim import cpu as cpu  # before torch, which reads the variables that it sets
from skim.version import __version__

if TYPE_CHECKING:
    from skim.llm import LLM as LLM
    from skim.llm import CompletionOutput as CompletionOutput
    from skim.llm import RequestOutput as RequestOutput
    from skim.sampling.grammar import Grammar as Grammar
    from skim.sampling.params import SamplingParams as SamplingParams

__all__ = ["LLM", "CompletionOutput", "Grammar", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when a name that needs them is accessed."""
    if name == "SamplingParams":
        from skim.sampling.params import SamplingParams

        return SamplingParams
    if name == "Grammar":
        from skim.sampling.grammar import Grammar

        return Grammar
    if name in __all__:
        import skim.llm

        return getattr(skim.llm, name)
    raise AttributeError(f"module 'skim' has no attribute {name!r}")
