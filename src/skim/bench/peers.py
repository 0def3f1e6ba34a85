"""Others on the same prompts in the same run: transformers, llama.cpp, or a server at a URL.

A peer reads whole prompts, cold, and proves it where it can: by its own count of the tokens it read. One that
skipped some of them has no time worth comparing.
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
from skim.bench.drive import FirstToken, Steps
from skim.bench.inputs import Prompt
from skim.bench.llama import LlamaCpp
from skim.errors import ConfigError
from skim.measure.report import MeasurementError, without_password
from skim.models.forwards.packed import bypass
from skim.models.load import LoadedModel

SYNTAX = "`transformers`, `llama.cpp`, or the URL of a server with OpenAI's API"
TOLERANCE = 0.05  # of the prompt's tokens: another tokenizer, a token that begins every text


class Peer(Protocol):
    """A contender that is not ours. What goes wrong is raised, and becomes the reason of a failed row."""

    name: str

    def first_token(self, prompt: Prompt) -> FirstToken: ...

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps: ...

    def close(self) -> None: ...


def check_peer(name: str) -> str:
    """The name of a peer that there is."""
    if name not in ("transformers", "llama.cpp") and not name.startswith(("http://", "https://")):
        raise ConfigError(f"unknown peer {without_password(name)!r}; give {SYNTAX}")
    return name


def make_peer(name: str, model: LoadedModel, source: str | None, longest: int) -> Peer:
    """A peer for the same weights and prompts up to `longest`; nothing is loaded yet.

    `source` is where the weights came from, None for a shape.
    """
    if name == "transformers":
        return Transformers(model)
    if name == "llama.cpp":
        return LlamaCpp(source, longest)
    return Server(check_peer(name))


class Transformers:
    """The engine's own module as transformers would run it, with SDPA attention, for as long as a turn lasts.

    So the weights are the same by construction, and a model that fills a device need not fit there twice.
    """

    name = "transformers"

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def first_token(self, prompt: Prompt) -> FirstToken:
        """One pass over the whole prompt, then one step on the `DynamicCache` that it left."""
        if len(prompt) >= self._model.max_positions:
            raise MeasurementError(
                f"the prompt has {len(prompt)} tokens, and the window of {self._model.name} "
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
        """Steps on a `DynamicCache` of random keys and values, as the engine's are."""
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
    """Any server with OpenAI's API, asked for a streamed completion; the clock is the client's."""

    def __init__(self, url: str) -> None:
        from skim.bench.load import Target

        self._target = Target(url, api_key=os.environ.get("SKIM_API_KEY"), ignore_eos=True)
        self.name = self._target.shown

    def first_token(self, prompt: Prompt) -> FirstToken:
        return asyncio.run(self._first_token(prompt))

    async def _first_token(self, prompt: Prompt) -> FirstToken:
        from skim.bench.load import Failure, ask, first_model

        if prompt.text is None:
            raise MeasurementError("a server reads text, and a shape's prompts are random token ids")
        async with self._target.client() as client:
            target = replace(self._target, model=await first_model(client, self._target))
            reply = await ask(client, target, prompt.text, 2, time.perf_counter())
        if isinstance(reply, Failure):
            raise MeasurementError(f"{self.name}: {reply.kind}: {reply.detail}")
        if abs(reply.prompt_tokens - len(prompt)) > TOLERANCE * len(prompt):
            raise MeasurementError(
                f"{self.name} ignored a part of the prompt: it counts {reply.prompt_tokens} tokens of "
                f"{len(prompt)}"
            )
        if (reply.cached_tokens or 0) > TOLERANCE * len(prompt):
            raise MeasurementError(
                f"{self.name} had {reply.cached_tokens} tokens of the prompt cached; give another --seed"
            )
        return FirstToken(reply.ttft, reply.gaps[0] if reply.gaps else None, reply.prompt_tokens)

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Steps:
        raise MeasurementError("a server's steps cannot be seen from outside; use `skim bench serve`")

    def close(self) -> None:
        pass
