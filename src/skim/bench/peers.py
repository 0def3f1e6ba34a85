"""Peers on the same prompts in the same run: transformers, llama.cpp, or a server at a URL.

A peer reads whole prompts, cold. Its own count of tokens read must confirm this where it has one: the time of
a peer that skipped tokens is not comparable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from skim.attention import hook
from skim.bench import llama
from skim.bench.drive import FirstToken, Steps
from skim.bench.inputs import Prompt
from skim.bench.llama import LlamaCpp
from skim.errors import ConfigError
from skim.measure.report import MeasurementError, without_password
from skim.models.forwards.packed import bypass
from skim.models.load import LoadedModel

SYNTAX = "`transformers`, `llama.cpp`, or the URL of a server with OpenAI's API"
TOLERANCE = 0.05  # of the prompt's tokens, for another tokenizer or a BOS token


class Peer(Protocol):
    """A contender other than Skim. Its exceptions become the reasons of failed rows."""

    name: str

    def first_token(self, prompt: Prompt) -> FirstToken: ...

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps: ...

    def close(self) -> None: ...


def check_peer(name: str) -> str:
    """Return the name of a known peer; raise for any other."""
    if name not in ("transformers", "llama.cpp") and not name.startswith(("http://", "https://")):
        raise ConfigError(f"unknown peer {without_password(name)!r}; give {SYNTAX}")
    return name


def check_ready(name: str, sources: Sequence[str | None]) -> None:
    """Raise unless a known peer can measure these models: it is installed, or its server answers.

    Called before anything is measured. A source is None for a shape.
    """
    try:
        if name == "llama.cpp":
            for source in sources:
                llama.check(source)
        elif name != "transformers":
            Server(name).connect()
    except MeasurementError as error:
        raise ConfigError(f"--peer: {error}") from error


def make_peer(name: str, model: LoadedModel, source: str | None, longest: int) -> Peer:
    """Make a peer for the same weights and prompts of up to `longest` tokens. Nothing is loaded yet.

    `source` names the weights; None for a shape.
    """
    if name == "transformers":
        return Transformers(model)
    if name == "llama.cpp":
        return LlamaCpp(source, longest)
    return Server(check_peer(name))


class Transformers:
    """The engine's module, run for one turn as transformers would run it, with SDPA attention.

    The weights are the same by construction, and a model that fills a device need not fit there twice.
    """

    name = "transformers"

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def first_token(self, prompt: Prompt) -> FirstToken:
        """One forward over the whole prompt, then one step on the resulting `DynamicCache`."""
        if len(prompt) >= self._model.max_positions:
            raise MeasurementError(
                f"the prompt has {len(prompt)} tokens, and the context window of {self._model.name} is "
                f"{self._model.max_positions}"
            )
        with self._sdpa() as module:
            cache = self._cache()
            stamps = [time.perf_counter()]
            ids = torch.tensor([prompt.tokens], device=self._model.device)
            for _ in range(2):
                logits = module(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                ids = logits.argmax(-1, keepdim=True)
                if not bool(torch.isfinite(logits).all()):  # also waits for the device
                    raise MeasurementError("transformers' logits are not finite")
                stamps.append(time.perf_counter())
            if cache.get_seq_length() != len(prompt) + 1:
                raise MeasurementError(
                    f"transformers read {cache.get_seq_length() - 1} of {len(prompt)} tokens"
                )
        return FirstToken(stamps[1] - stamps[0], stamps[2] - stamps[1], len(prompt))

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps:
        """Steps on a `DynamicCache` of random keys and values, like the engine's."""
        batch, context = len(prompts), len(prompts[0])
        model = self._model
        with self._sdpa() as module:
            cache = self._cache()
            for index, layer in enumerate(model.layers):
                keys, values = (
                    torch.randn(batch, layer.kv_heads, context, dim, dtype=model.dtype, device=model.device)
                    for dim in (layer.key_dim, layer.value_dim)
                )
                cache.update(keys, values, index)
            ids = torch.tensor([prompt.tokens[-1:] for prompt in prompts], device=model.device)
            seconds = []
            for _ in range(steps + 1):
                start = time.perf_counter()
                logits = module(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                ids = logits.argmax(-1, keepdim=True)
                ids.tolist()  # waits for the device
                seconds.append(time.perf_counter() - start)
            if not bool(torch.isfinite(logits).all()):
                raise MeasurementError("transformers' logits are not finite")
        return Steps(tuple(seconds[1:]), (context + steps // 2,) * batch)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.module.config)

    @contextlib.contextmanager
    def _sdpa(self) -> Iterator[Any]:
        module = self._model.module
        module.set_attn_implementation("sdpa")
        try:
            with bypass(module), torch.compiler.set_stance("force_eager"):
                yield module
        finally:
            module.set_attn_implementation(hook.NAME)


class Server:
    """Any server with OpenAI's API: a streamed completion, timed at the client."""

    def __init__(self, url: str) -> None:
        from skim.bench.load import Target

        self._target = Target(url, api_key=os.environ.get("SKIM_API_KEY"), ignore_eos=True)
        self.name = self._target.shown

    def connect(self) -> None:
        """Raise unless the server answers and lists a model."""
        asyncio.run(self._connect())

    async def _connect(self) -> None:
        from skim.bench.load import first_model

        async with self._target.client() as client:
            await first_model(client, self._target)

    def first_token(self, prompt: Prompt) -> FirstToken:
        return asyncio.run(self._first_token(prompt))

    async def _first_token(self, prompt: Prompt) -> FirstToken:
        from skim.bench.load import Failure, ask, first_model

        if prompt.text is None:
            raise MeasurementError(
                "a server needs text, but a shape's prompts are random token ids; use a model"
            )
        async with self._target.client() as client:
            target = replace(self._target, model=await first_model(client, self._target))
            reply = await ask(client, target, prompt.text, 2, time.perf_counter())
        if isinstance(reply, Failure):
            raise MeasurementError(f"{self.name}: {reply.kind}: {reply.detail}")
        if abs(reply.prompt_tokens - len(prompt)) > TOLERANCE * len(prompt):
            raise MeasurementError(
                f"{self.name} ignored part of the prompt: it counts {reply.prompt_tokens} tokens, not "
                f"{len(prompt)}"
            )
        if (reply.cached_tokens or 0) > TOLERANCE * len(prompt):
            raise MeasurementError(
                f"{self.name} had {reply.cached_tokens} tokens of the prompt cached; give another --seed"
            )
        return FirstToken(reply.ttft, reply.gaps[0] if reply.gaps else None, reply.prompt_tokens)

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps:
        raise MeasurementError("a server's decode steps cannot be timed from outside; use `skim bench serve`")

    def close(self) -> None:
        pass
