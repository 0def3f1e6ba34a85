"""Settings of the engine, in parts: model, memory, residency, scheduler, prefill, decode."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from skim.config.declare import Checked, Limits, assemble, declared, parse_bytes, parts
from skim.errors import ConfigError, shown
from skim.registry import scorer_help

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int4", "int8", "fp8")
AUTO_RATIO = 0.12  # most of the prompt that `keep` auto keeps
AUTO_MASS = 0.97  # `keep` auto stops at this part of the total score

BUDGETS = ("keep", "keep_ratio", "keep_tokens", "keep_mass")
"""Settings of which at most one is set: one from a higher source, or from a request, replaces the others."""

Count = Annotated[int, Limits(at_least=0)]
Positive = Annotated[int, Limits(at_least=1)]
Fraction = Annotated[float, Limits(above=0, at_most=1)]
FractionOrZero = Annotated[float, Limits(at_least=0, at_most=1)]


def _names_model(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{name} must name a model, such as {DEFAULT_MODEL!r}, got {shown(value)}", fields=name
        )


def _names_device(name: str, value: object) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise ConfigError(f"{name} must be auto, cpu, cuda or cuda:N, got {shown(value)}", fields=name)


def _auto_or_bytes(name: str, value: Any) -> None:
    if value != "auto":
        parse_bytes(name, value)


def _auto_or_count(name: str, value: Any) -> None:
    if value != "auto" and not (type(value) is int and value >= 0):
        raise ConfigError(f"{name} must be a number of layers or auto, got {shown(value)}", fields=name)


def _seconds_or_off(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value <= 1e9:
        raise ConfigError(
            f"{name} must be a number of seconds, or 0 to turn it off, got {shown(value)}", fields=name
        )


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The model, and the device and precision it runs with."""

    model: Annotated[str, Limits(check=_names_model)] = DEFAULT_MODEL
    """A local transformers directory, a Hugging Face id, a `.gguf` file, or the bundled `smollm2-135m`."""
    dtype: Annotated[str, Limits(choices=DTYPES)] = "auto"
    """`auto` (float32 on the CPU, bfloat16 on a GPU, or float16 on one below compute capability 8.0),
    `float32`, `bfloat16` or `float16`."""
    quantization: Annotated[str, Limits(choices=QUANTIZATIONS)] = "auto"
    """Format of the weights in memory: `auto` (as the file has them), `none` (dequantized to the dtype), or
    `int4`, `int8`, `fp8`: quantized while loading, the output head and a table tied to it in 8 bits. Norms
    and other embeddings keep the dtype."""
    device: Annotated[str, Limits(check=_names_device)] = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    memory_cap: Annotated[str | int | None, Limits(check=parse_bytes)] = None
    """Most bytes of a GPU that Skim takes, such as `24G`, as if the GPU were that small: to share it with
    other programs, or to try a smaller one. Default: the whole GPU. `gpu_memory_utilization` is a fraction of
    the cap."""
    offload_layers: Annotated[str | int, Limits(check=_auto_or_count)] = 0
    """Last layers of the model that stay in host memory. Each is copied to the GPU while the one before it
    computes. `auto` takes the fewest that let the rest fit beside one sequence of `max_model_len` tokens, or
    `kv_memory`. For a model larger than the GPU: prompts are still read fast, tokens are written slowly."""
    enforce_eager: bool = False
    """Run layers as transformers implements them: no compilation or CUDA graphs on a GPU, no fast forwards on
    a CPU. Faster start, slower inference."""
    max_model_len: Positive | None = None
    """Longest prompt plus output, in tokens. Default: the model's context window."""
    generation_config: Annotated[str, Limits(choices=("auto", "none"))] = "auto"
    """Sampling defaults: `auto` takes temperature, top_p, top_k, min_p and repetition_penalty from the
    model's `generation_config.json`, `none` takes none. End tokens are always taken from it."""

    @property
    def cap_bytes(self) -> int | None:
        return None if self.memory_cap is None else parse_bytes("memory_cap", self.memory_cap)

    @property
    def layers_on_host(self) -> int | None:
        """None if they are to be chosen by size."""
        return None if self.offload_layers == "auto" else int(self.offload_layers)

    @property
    def weights(self) -> tuple[str, ...]:
        """The settings that decide which weights are loaded, how, and where."""
        placed = self.device, str(self.cap_bytes), str(self.offload_layers)
        return self.model, self.dtype, self.quantization, *placed


@dataclass(frozen=True)
class MemoryConfig(Checked):
    """Memory for keys and values, and its sharing between requests."""

    kv_memory: Annotated[str | int, Limits(check=_auto_or_bytes)] = "auto"
    """Byte budget of the KV pool, such as `2G`. `auto` takes 40% of the memory that is free at start or, on a
    GPU, the rest of `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.9
    """Fraction of a GPU's memory, in (0, 1], for weights, drafter, activations and KV pool together. Ignored
    on the CPU, and if `kv_memory` is set."""
    block_size: Positive | None = None
    """Tokens in one KV block. Default: 16, or 64 on a GPU unless `slow_fast` is off."""
    kv_cache_dtype: Annotated[str, Limits(choices=("auto", "fp8", "int8", "int4", "k8v4"))] = "auto"
    """Format of stored keys and values: `auto` (the model's dtype), `int8`, `int4`, `k8v4` (8-bit keys, 4-bit
    values), or `fp8` (on GPUs that have it). Layers with a sliding window keep the model's dtype."""
    enable_prefix_caching: bool = True
    """Keep computed prefixes and share them between requests."""
    checkpoint_dir: str | None = None
    """Directory for prefixes that leave the KV pool. They return from it when a request begins with them,
    also after a restart. Default: none, and evicted prefixes are lost."""
    checkpoint_size: Annotated[str | int, Limits(check=parse_bytes)] = "16G"
    """Most bytes in `checkpoint_dir`. The least recently used prefixes without a name are removed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"checkpoint_dir {shown(self.checkpoint_dir)} needs enable_prefix_caching, which is off; "
                "enable it, or leave checkpoint_dir out",
                fields=("checkpoint_dir", "enable_prefix_caching"),
            )

    def kv_bytes(self, free_bytes: int) -> int:
        """Byte budget of the KV pool on a CPU with `free_bytes` free, or the configured one on any device."""
        if self.kv_memory == "auto":
            return int(free_bytes * 0.4)
        return parse_bytes("kv_memory", self.kv_memory)


@dataclass(frozen=True)
class ResidencyConfig(Checked):
    """Which models are on the device, and when. Keys and values always stay there."""

    residency: Annotated[str, Limits(choices=("auto", "both", "keep-target", "swap"))] = "auto"
    """`both`: model and drafter stay on the device. `keep-target`: the drafter comes to score prompts, and
    rows pause meanwhile. `swap`: each is parked in host memory while the other works. `auto` takes the first
    of these that leaves room for one sequence of `max_model_len` tokens."""
    idle_park: Annotated[float, Limits(check=_seconds_or_off)] = 0.0
    """Seconds without work after which all weights are parked: those of a GPU in host memory, those of a CPU
    in a file of the cache directory. The next request brings them back. 0 turns this off."""


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """Limits of the engine's steps."""

    max_num_seqs: Positive = 64
    """Most sequences in progress at once."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens in one forward: decode rows first, then prefill chunks. Default: 512, or 8192 on a GPU."""
    aging_steps: Positive = 8
    """Steps a sequence may be passed over before the scheduler reserves room for it."""

    step_time_target: Annotated[float, Limits(at_least=0, at_most=60_000)] | None = None
    """Milliseconds that a step with decode rows should take. Prefill chunks beside them are sized by measured
    cost, but at least 16 tokens or a 64th of the token budget: a target below the time of that has no effect.
    0 turns this off. Default: in `skim serve` 28 on a GPU and 150 on a CPU, elsewhere 0."""

    def for_serving(self, on_gpu: bool) -> SchedulerConfig:
        """The same settings with the defaults of a server."""
        if self.step_time_target is not None:
            return self
        return dataclasses.replace(self, step_time_target=28.0 if on_gpu else 150.0)

    def token_budget(self, on_gpu: bool) -> int:
        """Tokens in one forward; a chunk this size keeps the device busy and decode rows moving."""
        return self.max_num_batched_tokens or (8192 if on_gpu else 512)


@dataclass(frozen=True)
class PrefillConfig(Checked):
    """Sparse prefill: the part of a long prompt that is read."""

    sparse_prefill: Annotated[str, Limits(choices=("off", "auto", "always"))] = "off"
    """`off` reads every prompt in full, `auto` skims prompts of at least `min_prompt_tokens`, `always` skims
    all."""
    min_prompt_tokens: Positive = 1024
    """Shortest prompt that `auto` skims. At the default length, skimming became faster on a CPU."""
    scorer: Annotated[str, Limits(choices=scorer_help)] = "blend"
    """Scorer that ranks the prompt's blocks."""
    drafter: Annotated[str | None, Limits(check=_names_model, per_request=False)] = None
    """Model that scores prompts for the target, from any source. Default: the target's own first layers."""
    drafter_dtype: Annotated[str | None, Limits(choices=DTYPES, per_request=False)] = None
    """The drafter's dtype: `auto`, `float32`, `bfloat16` or `float16`. Default: the setting of `dtype`."""
    drafter_quantization: Annotated[str, Limits(choices=QUANTIZATIONS, per_request=False)] = "auto"
    """Format of the drafter's weights in memory, as `quantization`: `auto`, `none`, `int4`, `int8` or
    `fp8`."""
    scoring_budget: Fraction = 0.1
    """Largest share, for scoring, of the time that skimming saves, in (0, 1]. If the scoring model needs more
    for the whole prompt, words choose the part that it reads. 1 reads everything. Below 1, a GPU reads at
    least 256K tokens, and a CPU with VNNI (in brackets, another CPU) at least 4,608 (2,560), at most 14,745
    (8,192) of a prompt of over 33,177 (18,432) tokens."""
    hops: Annotated[str, Limits(choices=("1", "2", "auto"))] = "auto"
    """Looks at the prompt: `1` scores once, `2` also follows names from the best passages to others, `auto`
    repeats that while it finds more. Used by the scorer `blend`."""
    keep: Annotated[str | None, Limits(choices=("auto",))] = None
    """`auto`, the default budget: keep prompt blocks until they hold 97% of the total score, at most 12%
    of the prompt. A prompt whose question is about the whole text is read in full, or covered evenly if it
    exceeds the context window."""
    keep_ratio: Fraction | None = None
    """Fraction of the prompt to keep, in (0, 1]."""
    keep_tokens: Positive | None = None
    """Tokens of the prompt to keep."""
    keep_mass: Fraction | None = None
    """Keep the best prompt blocks until they hold this fraction of the total score, in (0, 1]."""
    prefill_block_size: Positive = 32
    """Tokens in one prompt block. Prompt blocks are kept or skipped whole. A prompt has at most 262,144; the
    longest prompts have larger ones."""
    head_tokens: Count = 32
    """Tokens at the beginning of the prompt that are always kept."""
    tail_tokens: Count = 32
    """Tokens at the end of the prompt that are always kept."""
    min_scored_tokens: Positive = 192
    """Minimum of tokens kept for their scores, even if the tokens that are always kept fill the budget. Half
    of the budget, or 512 tokens if that is less, is for scores in any case, where a long question leaves
    room."""
    rescue_cap: FractionOrZero = 0.1
    """Largest fraction of the tokens that are kept beside the pinned ones, for prompt blocks with rare words
    of the question, in [0, 1]; 0 turns this off."""
    neighbour_radius: Count = 0
    """Neighbours on each side to keep with every prompt block that is kept for its score."""
    tool_results: Annotated[str, Limits(choices=("keep", "skim", "aged"))] = "aged"
    """Long tool results: `keep` keeps all, `skim` skims all, `aged` skims those followed by two replies or
    more. If they do not fit the context window, all are skimmed."""
    positions: Annotated[str, Limits(choices=("auto", "original", "compact"))] = "auto"
    """Positions of kept tokens: `original`, `compact` (renumbered without gaps), or `auto` (compact if the
    prompt exceeds the context window)."""
    follow_up: Annotated[str, Limits(choices=("backfill", "replan", "reuse"))] = "backfill"
    """Prompt blocks for a follow-up question: `backfill` adds those it needs, `replan` starts over,
    `reuse` adds nothing (a control)."""
    prefill_attention: Annotated[str, Limits(choices=("dense", "blocksparse"))] = "dense"
    """Attention in prefill: `dense` reads all earlier tokens, `blocksparse` the key blocks that score high.
    Also used by the drafter with the scorer `full`."""
    blocksparse_alpha: FractionOrZero = 0.05
    """Read key blocks that score at least this fraction of the best, in [0, 1]: 0 reads all, 1 the fewest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = tuple(name for name in BUDGETS if getattr(self, name) is not None)
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are both set; set one of them", fields=given)
        if self.keep_tokens is not None and self.head_tokens + self.tail_tokens > self.keep_tokens:
            raise ConfigError(
                f"head_tokens {self.head_tokens} and tail_tokens {self.tail_tokens} are more than "
                f"keep_tokens {self.keep_tokens}; raise keep_tokens or lower them",
                fields=("keep_tokens", "head_tokens", "tail_tokens"),
            )

    @property
    def has_fixed_budget(self) -> bool:
        """True if a setting names the budget. Otherwise the scores decide (`keep` auto)."""
        return any(getattr(self, name) is not None for name in BUDGETS if name != "keep")

    def skims(self, prompt_tokens: int) -> bool:
        """True if a prompt of this length is to be skimmed."""
        if self.sparse_prefill == "auto":
            return prompt_tokens >= self.min_prompt_tokens
        return self.sparse_prefill == "always"


@dataclass(frozen=True)
class DecodeConfig(Checked):
    """Slow-fast decode: the part of a long context that a decode step reads."""

    slow_fast: Annotated[str, Limits(choices=("off", "auto", "on", "exact"))] = "off"
    """Slow-fast decode: most steps read the first, the latest and the best blocks of the context, some read
    everything. `off` reads everything in every step, `auto` uses slow-fast decode in contexts of at least
    `slow_fast_min_context` tokens, `on` in all that exceed the budget. `exact` has the contexts of `auto` and
    the tokens of `off`: fast steps draft tokens, and slow steps verify several at once. A request can use
    all of them unless the server started with `off`."""
    slow_fast_min_context: Positive = 8192
    """Shortest context, in tokens, in which `auto` and `exact` use slow-fast decode. Near the default, a fast
    step of one row took as long as a slow one on an H200."""
    decode_budget: Positive = 2048
    """Tokens of the context that a fast step reads, rounded up to KV blocks."""
    decode_candidates: Annotated[float, Limits(at_least=1, at_most=100)] | None = None
    """Candidates of a fast step for each block that it chooses. Half of the chosen blocks are those that rank
    best; the keys of the other candidates are compared for the rest. 1 compares none. Default: 1.5 on a CPU,
    1 on a GPU, which has no kernel for more."""
    refresh_interval: Positive = 64
    """Most tokens from one slow step to the next. Slow steps also follow the end of a sentence, and a fast
    step whose blocks hold too little of the attention (`refresh_mass`). 1 makes every step slow."""
    refresh_mass: FractionOrZero = 0.5
    """Least share of the attention that the blocks of a fast step should hold, as estimated by the step. A
    slow step follows one with less. 0 turns this off."""
    refresh_margin: Annotated[float, Limits(at_least=0)] = 0.2
    """Margin in nats, between the two likeliest tokens of a fast step, up to which a slow step reads
    everything and computes the token again before it is used. For replies with temperature 0; 0 turns this
    off."""

    positional: ClassVar[bool] = False
    """True in a control of evaluations: the latest blocks in place of the best."""
    fast_only: ClassVar[bool] = False
    """True in a control of evaluations: no slow step but the first."""

    @property
    def is_exact(self) -> bool:
        """True if slow steps verify all tokens that fast steps draft."""
        return self.slow_fast == "exact"

    def least_margin(self, *, greedy: bool) -> float:
        """The margin that a fast step's token must exceed, in nats, to be used without a slow step.

        Infinite in exact mode, where all are verified; 0 if every token is used.
        """
        if self.is_exact:
            return math.inf
        is_asked = greedy and self.slow_fast != "off" and not self.fast_only
        return self.refresh_margin if is_asked else 0.0

    def candidates(self, on_gpu: bool) -> float:
        """The candidates for each block that is chosen. ConfigError if the device has no kernel for them."""
        if on_gpu and self.decode_candidates not in (None, 1):
            raise ConfigError(
                f"decode_candidates must be 1 on a GPU, got {self.decode_candidates:g}; leave it out",
                fields="decode_candidates",
            )
        return self.decode_candidates or (1 if on_gpu else 1.5)

    def applies(self, context: int) -> bool:
        """True if decode steps in a context of this length may be fast."""
        least = 0 if self.slow_fast == "on" else self.slow_fast_min_context
        return self.slow_fast != "off" and context > max(self.decode_budget, least - 1)


@dataclass(frozen=True)
class EngineConfig:
    """All settings of the engine, in parts."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    residency: ResidencyConfig = dataclasses.field(default_factory=ResidencyConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    prefill: PrefillConfig = dataclasses.field(default_factory=PrefillConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def block_size(self, on_gpu: bool) -> int:
        """Tokens in one KV block. Longer blocks have fewer summaries, which a GPU's fast steps all read."""
        size = self.memory.block_size or (64 if on_gpu and self.has_summaries else 16)
        if on_gpu and self.has_summaries and size & (size - 1):
            raise ConfigError(
                f"block_size must be a power of two with slow_fast on a GPU, got {size}; use 16, 32 or 64",
                fields=("block_size", "slow_fast"),
            )
        return size

    def drafter_model(self, name: str) -> ModelConfig:
        """The settings of a drafter: the target's, with its own dtype, format of weights and window. None of
        its layers is on the host."""
        return dataclasses.replace(
            self.model,
            model=name,
            max_model_len=None,
            offload_layers=0,
            dtype=self.prefill.drafter_dtype or self.model.dtype,
            quantization=self.prefill.drafter_quantization,
        )

    @property
    def has_summaries(self) -> bool:
        """True if blocks are summarized for fast decode steps."""
        return self.decode.slow_fast != "off"

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Sort flat settings into the parts that declare them; an unknown name is an error."""
        known = [one.name for kind in parts(cls).values() for one in declared(kind)]
        for unknown in sorted(settings.keys() - set(known)):
            close = difflib.get_close_matches(unknown, known, n=1)
            hint = f"; did you mean {shown(close[0])}?" if close else f"; known settings: {', '.join(known)}"
            raise ConfigError(f"unknown setting {shown(unknown)}{hint}", fields=unknown)
        return assemble(cls, settings)
