"""Makes the scorers of one engine, each when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module

from skim.errors import ConfigError
from skim.prefill.scoring.drafter import Drafter, check_offsets
from skim.prefill.scoring.scorer import Scorer, ScoringModel
from skim.registry import module_of


@dataclass(frozen=True)
class Models:
    """The models of one engine: the argument of a scorer file's `make`."""

    target: ScoringModel
    drafter: ScoringModel | None = None

    @property
    def reader(self) -> ScoringModel:
        """The model that reads for scorers: the drafter, or the target without one."""
        return self.drafter or self.target

    def adapt(self, scorer: Scorer) -> Scorer:
        """Wrap a scorer that reads the reader's token ids, so that it scores the target's prompts."""
        return self._drafter.adapt(scorer)

    @cached_property
    def _drafter(self) -> Drafter:
        reader, target = self.reader, self.target
        made = Drafter(reader.module, reader.tokenizer, target.tokenizer)
        if not made.shares_tokens:
            check_offsets("drafter", reader)
            check_offsets("model", target)
        return made


def make_scorers(target: ScoringModel, drafter: ScoringModel | None) -> Callable[[str], Scorer]:
    """Scorers by name, made once each. Importing the scorer's file and making it may raise."""
    models = Models(target, drafter)

    @cache
    def make(name: str) -> Scorer:
        scorer: Scorer = import_module(module_of(name)).make(models)
        return scorer

    return make


def check_scorer(name: str, target: ScoringModel, drafter: ScoringModel | None) -> None:
    """Make the scorer `name` once, so that a scorer that cannot be made is a ConfigError at start.

    A scorer that fails on a prompt only means a dense prefill. The configured one would fail on every prompt.

    It is made in a thread that ends afterwards: OpenMP keeps workers for every thread that has computed.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="skim-scorer") as thread:
            thread.submit(make_scorers(target, drafter), name).result()
    except ConfigError as error:
        raise ConfigError(
            f"the scorer {name!r} cannot be used: {error}; or set another scorer",
            fields=tuple(dict.fromkeys(("scorer", *error.fields))),
        ) from error
