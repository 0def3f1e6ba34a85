"""The offline API, with the names that vLLM uses.

llm = LLM("smollm2-135m")
llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from skim.config import DEFAULT_MODEL, EngineConfig, PrefillConfig
from skim.control_tokens import find_controls, unused_mark, without_marks
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.start import park_early
from skim.engine.stats import EngineStats
from skim.errors import RequestError, shown
from skim.models.load import LoadedModel, load
from skim.models.source import prepare
from skim.outputs import RequestOutput, collect
from skim.prefill.anatomy import Anatomy, UnmappableError, map_chat, map_prompt
from skim.prefill.reading import Planned
from skim.prefill.request import Request
from skim.progress import counted
from skim.rendering import PLAIN, Rendering, render
from skim.sampling.params import SamplingParams
from skim.tokenization import Offsets, OffsetsError, encode_with_offsets, token_ids

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """An encoded prompt. `anatomy` is None if not requested, and an error if it could not be mapped."""

    text: str | None
    tokens: tuple[int, ...]
    anatomy: Anatomy | UnmappableError | None = None
    offsets: Offsets | None = None  # the tokens' characters in the text, if the anatomy of a chat was mapped


class LLM:
    """A model ready to generate. Settings are the fields of `skim.config`. Close it, or use `with`."""

    def __init__(
        self, model: str | os.PathLike[str] = DEFAULT_MODEL, *, progress: bool = True, **settings: Any
    ) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._open(EngineConfig.of(model=name, **settings), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool = True) -> LLM:
        """Create an LLM from a complete `EngineConfig`."""
        llm = cls.__new__(cls)
        llm._open(config, progress)
        return llm

    def _open(self, config: EngineConfig, progress: bool) -> None:
        self.config = config
        self.model_path: Path = prepare(config.model.model, progress=progress)
        drafter = None
        if config.prefill.drafter is not None:
            drafter = _load_drafter(config, progress=progress)
        elif (config.prefill.drafter_dtype, config.prefill.drafter_quantization) != (None, "auto"):
            log.warning("drafter_dtype and drafter_quantization have no effect without a drafter")
        self._start(load(self.model_path, config.model), drafter)

    def _start(self, model: LoadedModel, drafter: LoadedModel | None) -> None:
        self._drafter = drafter
        self.engine = Engine(model, self.config, drafter=drafter)
        self.engine.start()
        self._finalizer = weakref.finalize(self, self.engine.close)

    def with_settings(self, config: EngineConfig) -> LLM:
        """Another engine with other settings. Close it separately.

        It shares the weights, unless the settings of the model or of the drafter differ: then it loads its
        own.
        """
        llm = type(self).__new__(type(self))
        llm.config, llm.model_path = config, self.model_path
        shares = config.model.weights == self.config.model.weights
        drafter = self._drafter
        if drafter is not None and _drafter_weights(config) not in (None, _drafter_weights(self.config)):
            drafter = _load_drafter(config, progress=False)
        llm._start(self.engine.model if shares else load(self.model_path, config.model), drafter)
        return llm

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that the model's `generation_config.json` sets."""
        return self.engine.model.sampling_defaults

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefill: PrefillConfig | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids. Returns one output per prompt, in order.

        Without `params`, the model's sampling defaults apply. `prefill` overrides the engine's prefill
        settings for these requests.
        """
        chosen = self._prefill(prefill)
        skimmed = chosen.sparse_prefill != "off"
        encoded = [self.encode_prompt(prompt, skimmed=skimmed) for prompt in _as_prompts(prompts)]
        return self._run(encoded, params, chosen, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefill: PrefillConfig | None = None,
        control_tokens: str = "text",
        rendering: Rendering = PLAIN,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one or several conversations through the model's chat template.

        `prefill` overrides the engine's prefill settings for these requests. `control_tokens` is `text`, or
        `parse` for messages that you trust to contain control tokens of the template. `rendering` has the
        template's options.
        """
        if control_tokens not in ("text", "parse"):
            raise RequestError(
                f"control_tokens must be 'text' or 'parse', got {shown(control_tokens)}",
                fields="control_tokens",
            )
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages must be a list of messages, got {type(messages).__name__}", fields="messages"
            )
        if not messages:
            raise RequestError("messages is empty; give at least one message", fields="messages")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        chosen = self._prefill(prefill)
        skimmed = chosen.sparse_prefill != "off"
        prompts = [
            self.encode_chat(
                conversation, skimmed=skimmed, control_tokens=control_tokens, rendering=rendering
            )
            for conversation in conversations
        ]
        return self._run(prompts, params, chosen, use_tqdm)

    def plan(
        self,
        messages: Sequence[Message],
        *,
        prefill: PrefillConfig | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Prepared, Planned]:
        """Plan a conversation without generating. Returns its encoded prompt and the plan for it."""
        prompt = self.encode_chat(messages, skimmed=True)
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(prompt.tokens, params, self._prefill(prefill), prompt.anatomy)
        return prompt, self.engine.plan(request).result()

    def encode_prompt(
        self, prompt: Prompt, *, skimmed: bool, check: Callable[[str], None] | None = None
    ) -> Prepared:
        """Encode a plain text, or take token ids. `skimmed` adds the anatomy of a long text that asks.

        `check` sees the text before it is encoded, and may raise.
        """
        if not isinstance(prompt, str):
            return Prepared(None, tuple(prompt))
        if check is not None:
            check(prompt)
        tokens = self.encode(prompt)
        if not skimmed:
            return Prepared(prompt, tokens)
        with contextlib.suppress(UnmappableError):
            return Prepared(prompt, tokens, map_prompt(tokens, prompt, self._encode_with_offsets))
        return Prepared(prompt, tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        skimmed: bool | None = None,
        control_tokens: str = "text",
        check: Callable[[str], None] | None = None,
        rendering: Rendering = PLAIN,
    ) -> Prepared:
        """Encode a conversation. `skimmed` adds its anatomy; None adds it if the engine's settings may skim.

        Content parts are joined, and help to find the question. Control tokens such as `<|im_start|>` inside
        messages and tools are encoded as text, or with `control_tokens="parse"` as such. `check` sees the
        rendered text before it is encoded, and may raise.
        """
        plain, parts = _plain_messages(messages)
        mark = None
        texts = [plain, tools, rendering.chat_template_kwargs]
        if control_tokens == "text" and find_controls(self.tokenizer).are_in(texts):
            mark = unused_mark(texts)
        marked = self.render_chat(plain, tools=tools, rendering=rendering, mark=mark)
        text = marked.replace(mark, "") if mark is not None else marked
        if check is not None:
            check(text)
        if skimmed is None:
            skimmed = self.config.prefill.sparse_prefill != "off"
        anatomy: Anatomy | UnmappableError | None = None
        if skimmed:
            encode = cache(lambda _: self._encode_with_offsets(marked, mark))
            try:
                anatomy = map_chat(plain, text, encode, parts=parts)
                return Prepared(text, anatomy.tokens, anatomy, encode(text)[1])
            except UnmappableError as error:
                anatomy = error
        if mark is not None:
            return Prepared(text, tuple(self._encode_with_offsets(marked, mark)[0]), anatomy)
        return Prepared(text, self.encode(text, add_special_tokens=False), anatomy)

    def _encode_with_offsets(self, text: str, mark: str | None = None) -> tuple[list[int], Offsets]:
        """Tokens of a text and their characters, without those of a `mark`."""
        try:
            tokens, offsets = encode_with_offsets(self.tokenizer, text)
        except OffsetsError as error:
            raise UnmappableError(str(error)) from error
        return (tokens, offsets) if mark is None else without_marks(tokens, offsets, text, mark)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        rendering: Rendering = PLAIN,
        mark: str | None = None,
    ) -> str:
        """Render a conversation with the model's chat template."""
        if self.tokenizer.chat_template is None:
            raise RequestError(
                f"{self.config.model.model} has no chat template; use generate() with a plain prompt"
            )
        if not messages:
            raise RequestError("messages is empty; give at least one message", fields="messages")
        return render(self.tokenizer, messages, tools, rendering, mark)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a text. Pass `add_special_tokens=False` for rendered chat templates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid text: it has bytes that are not UTF-8") from error
        try:
            return tuple(token_ids(self.tokenizer, text, add_special_tokens=add_special_tokens))
        except Exception as error:
            raise RequestError(f"the prompt cannot be turned into tokens: {error}") from error

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Stop the engine. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefill(self, given: PrefillConfig | None) -> PrefillConfig:
        """The prefill settings of a request: its own, or those of the engine."""
        if given is None:
            return self.config.prefill
        if not isinstance(given, PrefillConfig):
            raise RequestError(
                f"prefill must be a PrefillConfig of skim.config, got {shown(given)}", fields="prefill"
            )
        return given

    def _run(
        self,
        prompts: Sequence[Prepared],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prefill: PrefillConfig,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams(**self.sampling_defaults)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"params must be SamplingParams or a list of them, got {shown(one)}", fields="params"
                )
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling parameters were given for {len(prompts)} prompts", fields="params"
            )
        handles: list[RequestHandle] = []
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                try:
                    handles.append(self.engine.submit(Request(prompt.tokens, one, prefill, prompt.anatomy)))
                except RequestError as error:
                    message = f"prompt {index}: {error}" if len(prompts) > 1 else str(error)
                    raise type(error)(message, fields=error.fields) from error
            outputs = []
            followed = counted(handles, "generating", "request") if use_tqdm else handles
            for prompt, one, handle in zip(prompts, each, followed, strict=True):
                outputs.append(collect(handle, prompt.text, prompt.tokens, one))
            return outputs
        except BaseException:
            for handle in handles:
                handle.abort()
            raise


def _load_drafter(config: EngineConfig, *, progress: bool) -> LoadedModel:
    """The drafter of these settings. It leaves a GPU at once if it need not stay there."""
    assert config.prefill.drafter is not None
    chosen = config.drafter_model(config.prefill.drafter)
    drafter = load(prepare(chosen.model, progress=progress), chosen)
    if config.residency.residency != "both" and drafter.device.type == "cuda":
        park_early(drafter, eager=config.model.enforce_eager)  # both may not fit together
    return drafter


def _drafter_weights(config: EngineConfig) -> tuple[str, ...] | None:
    """The settings that decide which weights a drafter has; None without one."""
    name = config.prefill.drafter
    return None if name is None else config.drafter_model(name).weights


def _plain_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[int, list[range]]]:
    """Join content parts into texts. Also return the places of the parts, by message."""
    plain = []
    parts: dict[int, list[range]] = {}
    for index, message in enumerate(messages):
        one = dict(message)
        content = one.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            texts = [str(part.get("text", "")) for part in content]
            ends = list(accumulate(len(text) + 1 for text in texts))  # joined by one newline
            one["content"] = "\n".join(texts)
            parts[index] = [
                range(end - len(text) - 1, end - 1) for text, end in zip(texts, ends, strict=True)
            ]
        plain.append(one)
    return plain, parts


def _as_prompts(prompts: Any) -> list[str | tuple[int, ...]]:
    """Normalize one prompt or several to a list; each is a text or token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be texts or lists of token ids, got {type(prompts).__name__}", fields="prompts"
        )
    many = list(prompts)
    with contextlib.suppress(TypeError, IndexError):
        operator.index(many[0])
        many = [many]  # the ids of one prompt
    found: list[str | tuple[int, ...]] = []
    for index, prompt in enumerate(many):
        try:
            if isinstance(prompt, bytes):
                raise TypeError("bytes are neither")
            found.append(prompt if isinstance(prompt, str) else tuple(map(operator.index, prompt)))
        except TypeError as error:
            raise RequestError(
                f"prompt {index} must be a text or a list of token ids: {error}", fields="prompts"
            ) from error
    return found
