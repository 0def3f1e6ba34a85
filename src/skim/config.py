"""Settings, one dataclass per concern.

Every field's docstring (the string below it) is its help text wherever settings are shown, and its
name is the keyword of `LLM(...)`. Values are checked on construction, so a config that exists is valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import Any

from skim.errors import ConfigError
from skim.registry import scorer_help

DEFAULT_MODEL = "smollm2-135m"

BUDGETS = ("keep_ratio", "keep_tokens", "keep_mass")  # of a plan, of which one at most is set

_BYTE_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_BYTES = 2**63


def parse_bytes(name: str, value: str | int) -> int:
    """`"512M"`, `"1.5GiB"` or a plain number of bytes -> bytes."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{name} must be a size such as '512M' or '4G', got {value!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value), re.IGNORECASE)
    size = float(match[1]) * _BYTE_UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < _MOST_BYTES:
        raise ConfigError(f"{name} must be a size such as '512M' or '4G', got {value!r}")
    return int(size)


def _at_least(config: object, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def _one_of(config: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    """Which model runs, and on what."""

    model: str = DEFAULT_MODEL
    """A local transformers directory, a Hugging Face id, a `.gguf` file, or the bundled `smollm2-135m`."""
    dtype: str = "auto"
    """`auto` (float32 on the CPU, bfloat16 on a GPU), `float32`, `bfloat16` or `float16`."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    enforce_eager: bool = False
    """Run layers as transformers has them: on a GPU without compiling and graphs, on a CPU without Skim's
    shorter forward of common layers. Slower, and sooner ready."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. Default: the model's own window."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError(
                f"model must name a model, got {self.model!r}; the default is {DEFAULT_MODEL!r}"
            )
        _one_of(self, "dtype", ("auto", "float32", "bfloat16", "float16"))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(f"enforce_eager must be True or False, got {self.enforce_eager!r}")
        if self.max_model_len is not None:
            _at_least(self, 1, "max_model_len")


@dataclass(frozen=True)
class MemoryConfig:
    """How much memory keys and values may take, and how it is shared."""

    kv_memory: str | int = "auto"
    """Byte budget of the KV pool, such as `2G`. `auto` takes 40% of the memory that is free at start, or what
    `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory, in (0, 1], that weights, drafter, activations and pool may take together.
    Ignored on the CPU, and where `kv_memory` is set."""
    block_size: int = 16
    """Tokens in one block of the KV pool."""
    enable_prefix_caching: bool = True
    """Keep computed prefixes and share them between requests."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "block_size")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}"
            )
        if self.kv_memory != "auto":
            parse_bytes("kv_memory", self.kv_memory)

    def kv_bytes(self, free_bytes: int) -> int:
        """The pool's byte budget where `free_bytes` are free: of a CPU, or as it was set."""
        if self.kv_memory == "auto":
            return int(free_bytes * 0.4)
        return parse_bytes("kv_memory", self.kv_memory)


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share the steps of the engine."""

    max_num_seqs: int = 64
    """Most sequences in progress at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one forward, decode rows first, then prefill chunks. Default: 512, or 8192 on a GPU."""
    aging_steps: int = 8
    """Steps a sequence may be passed over before room is kept for it."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_num_seqs", "aging_steps")
        if self.max_num_batched_tokens is not None:
            _at_least(self, 1, "max_num_batched_tokens")

    def token_budget(self, on_gpu: bool) -> int:
        """Tokens in one forward; a chunk this size keeps the device busy and decode rows moving."""
        return self.max_num_batched_tokens or (8192 if on_gpu else 512)


@dataclass(frozen=True)
class PrefillConfig:
    """How much of a long prompt is read, and what decides."""

    sparse_prefill: str = "off"
    """`off` reads every prompt in full, `auto` skims those of at least `min_prompt_tokens`, `always` all."""
    min_prompt_tokens: int = 1024
    """Shortest prompt that `auto` skims; the default is where skimming became faster on a CPU."""
    scorer: str = dataclasses.field(default="cascade", metadata={"choices": scorer_help})
    """Scorer that ranks the blocks of a prompt."""
    drafter: str | None = None
    """Model that scores for the target, from any source. Default: the target's own first layers."""
    keep_ratio: float | None = None
    """Share of the prompt to keep, in (0, 1]. Default: 0.1, unless `keep_tokens` or `keep_mass` is given."""
    keep_tokens: int | None = None
    """Tokens of the prompt to keep."""
    keep_mass: float | None = None
    """Keep the best blocks until they have this share of all scores, in (0, 1]."""
    prefill_block_size: int = 64
    """Tokens in one block of the prompt: blocks are kept or skipped whole."""
    head_tokens: int = 64
    """Tokens at the beginning of the prompt that are always kept."""
    tail_tokens: int = 64
    """Tokens at the end of the prompt that are always kept."""
    min_scored_tokens: int = 384
    """Tokens kept for their scores, however little the budget leaves beside what is always kept."""
    rescue_cap: float = 0.25
    """Most of the budget that blocks with rare words of the question may take, in [0, 1]; 0 for none."""
    neighbour_radius: int = 0
    """Blocks on either side that a block kept for its score brings along."""
    positions: str = "auto"
    """Of kept tokens: `original`, `compact` (numbered through), or `auto`: compact beyond the window."""
    follow_up: str = "backfill"
    """At a further question: `backfill` adds what it needs to what was read, `replan` starts afresh, `reuse`
    adds nothing (a control)."""
    prefill_attention: str = "dense"
    """What a prompt's tokens attend to: `dense` all before them, `blocksparse` the blocks that score high; in
    the target, and in the drafter where it reads in `full`."""
    blocksparse_alpha: float = 0.05
    """A block is read from this share of the best block's score on, in [0, 1]: 0 reads all, 1 the fewest."""

    def __post_init__(self) -> None:
        _one_of(self, "sparse_prefill", ("off", "auto", "always"))
        _one_of(self, "scorer", tuple(scorer_help()))
        _one_of(self, "positions", ("auto", "original", "compact"))
        _one_of(self, "follow_up", ("backfill", "replan", "reuse"))
        _one_of(self, "prefill_attention", ("dense", "blocksparse"))
        _at_least(self, 1, "min_prompt_tokens", "prefill_block_size", "min_scored_tokens")
        _at_least(self, 0, "head_tokens", "tail_tokens", "neighbour_radius")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are both set; set one of them")
        for name in ("keep_ratio", "keep_mass"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1
            ):
                raise ConfigError(f"{name} must be in (0, 1], got {value!r}")
        for name in ("rescue_cap", "blocksparse_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {value!r}")
        if self.keep_tokens is not None:
            _at_least(self, 1, "keep_tokens")
            if self.head_tokens + self.tail_tokens > self.keep_tokens:
                raise ConfigError(
                    f"head_tokens {self.head_tokens} and tail_tokens {self.tail_tokens} are more than "
                    f"keep_tokens {self.keep_tokens}; raise keep_tokens or lower them"
                )
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter.strip()):
            raise ConfigError(f"drafter must name a model, got {self.drafter!r}")

    def skims(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length is to be skimmed."""
        if self.sparse_prefill == "auto":
            return prompt_tokens >= self.min_prompt_tokens
        return self.sparse_prefill == "always"


@dataclass(frozen=True)
class ServerConfig:
    """Where the HTTP server listens, who may use it, and how much one request may ask for."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only."""
    port: int = 8000
    """Port to listen on; 0 takes any free one."""
    served_model_name: str | None = None
    """Name clients call the model by. Default: the model as it was given."""
    api_key: str | None = None
    """Key that every route but `/health` then asks for, as `Authorization: Bearer KEY`. Default: no key."""
    admin_key: str | None = None
    """Key for the routes under `/admin`, which are off without one."""
    max_queued_requests: int = 256
    """Sequences that may wait beyond `max_num_seqs`; a request over it is answered 429."""
    request_timeout: float = 600.0
    """Seconds a request may take before it is aborted with 408."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    max_body_size: str | int = "16M"
    """Largest request body."""
    max_n: int = 16
    """Largest `n` of a request, and most prompts in one completion request."""
    max_stop_strings: int = 16
    """Most stop strings, and most stop token ids, of a request."""
    max_stop_length: int = 256
    """Longest stop string, in characters."""
    max_logit_bias: int = 1024
    """Most entries of `logit_bias`."""
    max_schema_size: str | int = "64K"
    """Largest JSON schema a reply may be held to, tool parameters included."""
    tool_parser: str = "auto"
    """How tool calls are written by the model: `auto` (by model family) or `hermes`."""
    log_level: str = "info"
    """Least severe log line that is shown: `debug`, `info`, `warning` or `error`."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "port", "max_queued_requests")
        _at_least(self, 1, "max_n", "max_stop_strings", "max_stop_length", "max_logit_bias")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
        for name in ("host", "served_model_name", "api_key", "admin_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} must be a text that is not empty")
        for name in ("max_body_size", "max_schema_size"):
            parse_bytes(name, getattr(self, name))
        _one_of(self, "tool_parser", ("auto", "hermes"))
        _one_of(self, "log_level", ("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine needs to know, in parts."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    prefill: PrefillConfig = dataclasses.field(default_factory=PrefillConfig)

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Sort flat settings into the parts they belong to; an unknown name is an error."""
        kinds: dict[str, Any] = {part.name: part.default_factory for part in dataclasses.fields(cls)}
        names = {part: [f.name for f in dataclasses.fields(kind)] for part, kind in kinds.items()}
        known = [name for group in names.values() for name in group]
        for unknown in sorted(settings.keys() - set(known)):
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known settings: {', '.join(known)}"
            raise ConfigError(f"unknown setting {unknown!r}{hint}")
        parts = {
            part: kind(**{name: settings[name] for name in names[part] if name in settings})
            for part, kind in kinds.items()
        }
        return cls(**parts)
