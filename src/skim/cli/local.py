"""The model in this process: opened with signs of life, answering as a stream of events."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skim.cli.progress import progress
from skim.config import EngineConfig

if TYPE_CHECKING:
    from skim.engine.sequence import Delta, Finished
    from skim.llm import LLM
    from skim.sampling.params import SamplingParams


@contextlib.contextmanager
def opened(config: EngineConfig) -> Iterator[LLM]:
    """The model, fetched where needed, loaded and ready; its engine is stopped on leaving.

    It is fetched before transformers is imported, so that a misspelt name is told early.
    """
    from skim.models.source import prepare

    settings: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        values = getattr(config, part.name)
        settings |= {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    name = settings["model"]
    settings["model"] = str(prepare(name))
    with progress(f"loading {name}"):
        from transformers.utils import logging

        from skim.llm import LLM

        logging.set_verbosity_error()  # what goes wrong is reported by Skim, once
        llm = LLM(progress=False, **settings)
    with llm:
        yield llm


def answer(
    llm: LLM, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, silent: bool = False
) -> Generator[Delta | Finished, None, None]:
    """The reply as it comes. Closing the iterator, or an exception in it, ends the request.

    `silent` tells that nobody sees the reply before its end, so a sign of life is due until then.
    """
    with progress("splitting the prompt into tokens"):
        prompt = llm.encode(llm.render_chat(messages), add_special_tokens=False)
    before = llm.stats().tokens_computed
    handle = llm.engine.submit(prompt, params)
    events = iter(handle)
    try:
        with progress(
            f"reading {len(prompt)} tokens", len(prompt), lambda: llm.stats().tokens_computed - before
        ):
            first = next(events)
        yield first
        with progress("answering") if silent else contextlib.nullcontext():
            yield from events
    except BaseException:
        handle.abort()
        raise
