"""A model in this process: opened with progress shown, answering as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skim.config import EngineConfig, PrefillConfig
from skim.progress import progress

if TYPE_CHECKING:
    from skim.engine.sequence import Delta, Finished
    from skim.llm import LLM
    from skim.sampling.params import SamplingParams


@contextlib.contextmanager
def opened(config: EngineConfig) -> Iterator[LLM]:
    """Download the model if needed, load it, and stop its engine on exit.

    The download comes before the import of transformers, so that a misspelt name fails early.
    """
    from skim.models.source import prepare

    prepare(config.model.model)
    with progress(f"loading {config.model.model}"):
        from transformers.utils import logging

        from skim.llm import LLM

        logging.set_verbosity_error()  # Skim reports errors itself, once
        llm = LLM.from_config(config, progress=False)
    with llm:
        yield llm


def answer(
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    prefill: PrefillConfig | None = None,
    silent: bool = False,
) -> Generator[Delta | Finished, None, None]:
    """Stream the reply. Closing the iterator, or an exception in it, aborts the request.

    `silent` means that the reply is shown only at its end, so progress is shown until then.
    """
    from skim.prefill.request import Request

    prefill = prefill or llm.config.prefill
    with progress("splitting the prompt into tokens"):
        prompt = llm.encode_chat(messages, skimmed=prefill.sparse_prefill != "off")
    count = len(prompt.tokens)
    before = llm.stats().tokens_computed
    handle = llm.engine.submit(Request(prompt.tokens, params, prefill, prompt.anatomy))
    events = iter(handle)
    try:
        if prefill.skims(count):
            signs = progress(f"skimming {count} tokens")  # the number of kept tokens is not known yet
        else:
            signs = progress(f"reading {count} tokens", count, lambda: llm.stats().tokens_computed - before)
        with signs:
            first = next(events)
        yield first
        with progress("answering") if silent else contextlib.nullcontext():
            yield from events
    except BaseException:
        handle.abort()
        raise
