"""Modes: the ways to read a prompt that reports compare, named as on the command line."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from skim.config import DecodeConfig, EngineConfig, PrefillConfig
from skim.config.declare import declared
from skim.errors import ConfigError
from skim.registry import scorers

DENSE = "dense"
BLOCKSPARSE = "blocksparse"
AUTO = "auto"
KV = "kv_cache_dtype"
WEIGHTS = "quantization"
SYNTAX = (
    "`dense` (read everything), SCORER:KEEP (read the prompt blocks that a scorer ranks best; scorers: "
    f"{', '.join(scorers())}; KEEP is a fraction as in `blend:0.05`, a number of tokens as in "
    "`lexical:512t`, or `auto`), `auto` or `auto:0.1` (dense below `min_prompt_tokens`, the default scorer "
    "for longer prompts), or `blocksparse` (read all tokens, attend to the key blocks that score high; "
    "`blocksparse:0.3` sets the threshold); add settings after commas: `blend:0.1,follow_up=replan`, "
    "`dense,kv_cache_dtype=int8`, `dense,quantization=int4`, `dense,slow_fast=on,decode_budget=1024`. "
    "`slow-fast`, `refresh-only`, `fast-only` and `exact` read the whole prompt and decode slow-fast: as it "
    "is, with the latest blocks in place of the best, without slow steps but the first, and with drafts "
    "that slow steps verify, as in `exact,decode_budget=1024`"
)


class RefreshOnly(DecodeConfig):
    """A control: fast steps read the latest blocks in place of the best."""

    positional = True


class FastOnly(DecodeConfig):
    """A control: no slow step but the first."""

    fast_only = True


UNSET = {"sparse_prefill", "scorer", "drafter", "drafter_dtype", "drafter_quantization"}  # by modes
DECODES = tuple(field.name for field in dataclasses.fields(DecodeConfig))
ARMS: dict[str, type[DecodeConfig]] = {
    "slow-fast": DecodeConfig,
    "refresh-only": RefreshOnly,
    "fast-only": FastOnly,
    "exact": DecodeConfig,
}
"""Slow-fast decode, its controls, and its exact mode."""


@dataclass(frozen=True)
class Mode:
    """One way to read prompts."""

    name: str  # as given on the command line
    prefill: PrefillConfig
    kv_cache_dtype: str | None = None  # None for the engine's own
    decode: DecodeConfig | None = None  # the same
    quantization: str | None = None  # of the weights; the same

    @property
    def is_dense(self) -> bool:
        """True if it reads every prompt in full, with exact attention, in the engine's KV format."""
        reads_all = self.prefill.sparse_prefill == "off" and self.prefill.prefill_attention == DENSE
        own = (self.kv_cache_dtype, self.decode, self.quantization)
        return reads_all and not any(own)

    def engine(self, config: EngineConfig) -> EngineConfig:
        """The settings of an engine for this mode: its KV format, and summaries if it decodes slow-fast.

        All modes with summaries share an engine: each request has the settings of its mode.
        """
        model, memory, decode = config.model, config.memory, config.decode
        if self.quantization is not None:
            model = dataclasses.replace(model, quantization=self.quantization)
        if self.kv_cache_dtype is not None:
            memory = dataclasses.replace(memory, kv_cache_dtype=self.kv_cache_dtype)
        if self.decode is not None and decode.slow_fast == "off":
            decode = dataclasses.replace(decode, slow_fast="on")
        return dataclasses.replace(config, model=model, memory=memory, decode=decode)


def parse_mode(text: str, *, drafter: str | None = None) -> Mode:
    """Parse a mode. It skims prompts of any length, since a threshold would hide the effect.

    `auto` is the exception: it keeps the threshold, to measure it.
    """
    first, *extra = text.split(",")
    scorer, _, keep = first.partition(":")
    if scorer not in (DENSE, AUTO, BLOCKSPARSE, *ARMS, *scorers()):
        close = difflib.get_close_matches(scorer, (DENSE, AUTO, BLOCKSPARSE, *ARMS, *scorers()), n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"write {SYNTAX}"
        raise ConfigError(f"unknown mode {text!r}; {remedy}")
    settings: dict[str, Any] = dict(_setting(text, one) for one in extra)
    kv_cache_dtype, quantization = settings.pop(KV, None), settings.pop(WEIGHTS, None)
    decode = _decode(text, scorer, {name: settings.pop(name) for name in DECODES if name in settings})
    if scorer in (DENSE, *ARMS):
        if keep or settings:
            allowed = ", ".join((KV, WEIGHTS, *DECODES))
            raise ConfigError(f"mode {text!r}: {scorer} reads everything and has no settings but {allowed}")
        return Mode(text, PrefillConfig(drafter=drafter), kv_cache_dtype, decode, quantization)
    if scorer == BLOCKSPARSE:
        settings["prefill_attention"] = BLOCKSPARSE
    try:
        if keep and scorer == BLOCKSPARSE:
            settings["blocksparse_alpha"] = float(keep)
        elif keep == AUTO:
            settings["keep"] = AUTO
        elif keep.endswith("t"):
            settings["keep_tokens"] = int(keep[:-1])
        elif keep:
            settings["keep_ratio"] = float(keep)
    except ValueError:
        raise ConfigError(
            f"mode {text!r}: {keep!r} is neither a fraction, as in `blend:0.05`, nor a number of tokens, as "
            "in `blend:600t`, nor `auto`"
        ) from None
    if scorer == "random":
        settings.setdefault("rescue_cap", 0.0)  # a control must not use the question
    if scorer not in (AUTO, BLOCKSPARSE):
        settings |= {"sparse_prefill": "always", "scorer": scorer}
    elif scorer == AUTO:
        settings["sparse_prefill"] = AUTO
    try:
        chosen = PrefillConfig(drafter=drafter, **settings)
    except ConfigError as error:
        raise ConfigError(f"mode {text!r}: {error}") from error
    return Mode(text, chosen, kv_cache_dtype, decode, quantization)


def _decode(mode: str, first: str, settings: dict[str, Any]) -> DecodeConfig | None:
    """The decode settings of a mode; None if it names none, or turns slow-fast decode off."""
    if first in ARMS and "slow_fast" in settings:
        raise ConfigError(
            f"mode {mode!r}: {first} sets slow_fast itself; leave it out, or write dense,slow_fast=..."
        )
    if first == "exact":
        settings = {"slow_fast": "exact", "slow_fast_min_context": 1, **settings}  # whatever the context
    elif first in ARMS:
        settings.setdefault("slow_fast", "on")
    if settings.get("slow_fast", "off") == "off":
        if first in ARMS or len(settings) > ("slow_fast" in settings):
            detail = next((name for name in settings if name != "slow_fast"), first)
            raise ConfigError(f"mode {mode!r}: {detail} needs slow_fast=on, auto or exact")
        return None
    try:
        return ARMS.get(first, DecodeConfig)(**settings)
    except ConfigError as error:
        raise ConfigError(f"mode {mode!r}: {error}") from error


def _setting(mode: str, text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name in (KV, WEIGHTS):
        try:
            EngineConfig.of(**{name: value})
            return name, value
        except ConfigError as error:
            raise ConfigError(f"mode {mode!r}: {error}") from error
    kind_of = DecodeConfig if name in DECODES else PrefillConfig
    known = [field.name for field in dataclasses.fields(PrefillConfig) if field.name not in UNSET]
    known += [*DECODES, KV, WEIGHTS]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"its settings: {', '.join(known)}"
        raise ConfigError(f"mode {mode!r}: {name!r} is not a setting of modes; {remedy}")
    if any(one.choices for one in declared(kind_of) if one.name == name):
        return name, value
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
