"""Grammars that constrain a reply, compiled by llguidance, and a sequence's position in one.

A grammar is compiled at submit, on the caller's thread: an invalid or oversized grammar is refused at once,
and the engine loop never waits for a compiler. The loop only asks for the allowed tokens and reports the
chosen one. That takes tens of microseconds per token, and at most tens of milliseconds for grammars built to
be slow.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skim.device import to_device
from skim.errors import RequestError
from skim.sampling import dialects
from skim.sampling.closed import close_objects
from skim.sampling.schema import MAX_BYTES, Schema, check_schemas, refused

COMPILE_SECONDS = 5.0
"""Compilation timeout. No grammar within the limits of `schema.py` is known to reach it."""

_MAX_CACHED = 16  # compiled grammars; the lexer states of one may grow to about 50 MB
_STACK_BYTES = 2**28  # address space, mostly unused; a stack overflow of the compiler kills the process
_LIMITS = {
    "max_grammar_size": 20_000,
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 100_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
_stack_size_lock = threading.Lock()  # the stack size is a process-wide setting
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Disables computing forced text ahead of time: it is unused here, and `a{1000000}` forces a megabyte."""
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""At most one space after a comma or colon: otherwise small models write white space up to `max_tokens`.
No \\u escapes: with them, a known key could be written under another spelling."""


@dataclass(frozen=True)
class Grammar:
    """The form that a reply must have. Grammars with equal sources are equal and are compiled once."""

    source: str
    """The grammar in llguidance's dialect of Lark; matching begins at the rule `start`."""
    asked_by: str = field(default="grammar", compare=False)
    """The request's field that asks for it, which errors name."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise refused(f"a grammar must be a string, got {type(self.source).__name__}")
        if len(self.source) > MAX_BYTES:
            raise self._refused(
                f"the grammar has {len(self.source)} characters; at most {MAX_BYTES} are supported"
            )

    @classmethod
    def json_schema(cls, schema: Schema) -> Grammar:
        """JSON that follows a schema, given as JSON text or as a parsed object.

        Keywords that llguidance cannot enforce are refused by name at submit. Properties are written in the
        schema's order, and no others, unless the schema has `additionalProperties` (see `closed.py`). The
        JSON is compact, with at most one space after a comma or colon.
        """
        return cls.lark("", {"start": schema})

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def lark(cls, text: str, schemas: Mapping[str, Schema] | None = None) -> Grammar:
        """A Lark grammar. Each entry of `schemas` becomes a rule of that name that matches JSON following it.

        Schemas written in the text itself with `%json` are limited only by llguidance.
        """
        named = schemas or {}
        rules = []
        for name, schema in zip(named, check_schemas(named.values()), strict=True):
            close_objects(schema)
            rules.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
        return cls("\n".join([text, *rules] if text else rules))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole, in the syntax of Rust's crate `regex`."""
        return cls(dialects.from_regex(pattern))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Exactly one of these texts."""
        return cls(dialects.from_choices(choices))

    @classmethod
    def text(cls, grammar: str) -> Grammar:
        """A grammar as a client sends it: in Lark, or in llama.cpp's GBNF."""
        return cls(dialects.from_grammar(grammar))

    @classmethod
    def either(cls, *options: Grammar) -> Grammar:
        """Text that follows one of several grammars."""
        names = [f"option_{index}" for index in range(len(options))]
        rules = [f"{name}: %lark {{\n{one.source}\n}}" for name, one in zip(names, options, strict=True)]
        return cls("\n".join([f"start: {' | '.join(names)}", *rules]))

    def after(self, rules: str) -> Grammar:
        """This grammar, after a text that the rule `before` of other `rules` matches."""
        return replace(self, source=f"start: before answer\n{rules}\nanswer: %lark {{\n{self.source}\n}}")

    def _refused(self, message: str) -> RequestError:
        named = message if self.asked_by == "grammar" else f"{self.asked_by}: {message}"
        return refused(named, self.asked_by)


class Matcher:
    """One sequence's position in its grammar. Not thread-safe."""

    def __init__(self, inner: Any, words: int) -> None:
        self._inner = inner
        self.words = words
        """32-bit words in a mask, one bit per token; covers at least the model's vocabulary."""
        self.error: str | None = None
        """The reason that the matcher failed; no token is allowed after a failure."""

    def copy(self) -> Matcher:
        """An independent matcher at the same position."""
        return Matcher(self._inner.deep_copy(), self.words)

    def fill(self, words: Tensor) -> None:
        """Write the mask of allowed next tokens, one bit per token, into the int32 host tensor `words`.

        At the end of the grammar only end-of-sequence tokens are allowed.
        """
        if self.error is None:
            self._inner.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
            self._note_error()
        if self.error is not None:
            words.zero_()

    def consume(self, token_id: int) -> None:
        """Advance past an allowed token."""
        if self.error is None:
            self._inner.consume_token(token_id)
            self._note_error()

    def _note_error(self) -> None:
        if self._inner.is_error():
            self.error = f"the grammar matcher failed: {_reason(self._inner.get_error())}"


def forbidden_tokens(matchers: Sequence[Matcher], vocab_size: int, device: torch.device) -> Tensor:
    """bool [matchers, vocab] on the device: True for tokens not allowed next. One host copy."""
    words = max(matcher.words for matcher in matchers)
    masks = torch.zeros(len(matchers), words, dtype=torch.int32)
    for mask, matcher in zip(masks, matchers, strict=True):
        matcher.fill(mask[: matcher.words])
    packed = to_device(masks, device).view(torch.uint8)  # [matchers, bytes]
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    bits = (packed[:, :, None] >> shifts) & 1  # [matchers, bytes, 8]
    return bits.flatten(1)[:, :vocab_size] == 0


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer. Thread-safe.

    The tokenizer is read for the first grammar, which takes about a second. Sequences with equal grammars
    share a lexer that is built lazily, so later sequences reuse its states. Once one sequence fills the lexer
    to its limit, it is unusable for all of them, and the next request compiles a new one.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens: Any = None  # llguidance's view of the tokenizer
        self._words = 0  # 32-bit words in one mask
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start. RequestError if the grammar is invalid or matches nothing."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is not None and (matcher := self._begin(known)).error is None:
            with self._lock:
                if grammar in self._compiled:
                    self._compiled.move_to_end(grammar)
            return matcher
        compiled, matcher = self._compile_in_thread(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def _begin(self, compiled: Any) -> Matcher:
        """A matcher at the start. Computing one mask sets its `error` if no token is allowed or the shared
        lexer has failed."""
        matcher = Matcher(compiled.deep_copy(), self._words)
        matcher.fill(torch.empty(self._words, dtype=torch.int32))
        return matcher

    def _compile_in_thread(self, grammar: Grammar) -> tuple[Any, Matcher]:
        """Compile in a thread with a large stack; wait at most `COMPILE_SECONDS`."""
        tokens = self._read_tokenizer()
        done: list[tuple[Any, Matcher] | BaseException] = []

        def work() -> None:
            from llguidance import LLMatcher, LLParserLimits

            limits = LLParserLimits(**_LIMITS)
            try:
                compiled = LLMatcher(tokens, _HEADER + grammar.source, log_level=0, limits=limits)
                done.append((compiled, self._begin(compiled)))
            except BaseException as error:  # a Rust panic is not an Exception
                done.append(error)

        with _stack_size_lock:
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread = threading.Thread(target=work, name="skim-grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join(COMPILE_SECONDS)
        if not done:
            raise grammar._refused(
                f"the grammar took longer than {COMPILE_SECONDS:g} s to compile; simplify it"
            )
        if isinstance(done[0], BaseException):
            raise grammar._refused(f"the grammar cannot be compiled: {_reason(str(done[0]))}") from done[0]
        compiled, matcher = done[0]
        if compiled.is_error():
            raise grammar._refused(f"the grammar is refused: {_reason(compiled.get_error())}")
        if matcher.error is not None:
            raise grammar._refused("the grammar is refused: it matches no text")
        return compiled, matcher

    def _read_tokenizer(self) -> Any:
        with self._tokens_lock:
            if self._tokens is None:
                try:
                    from llguidance.hf import from_tokenizer
                except ImportError as error:
                    raise dialects.missing() from error
                try:
                    own = max(self._tokenizer.get_vocab().values()) + 1
                    ends = sorted(end for end in self._eos_token_ids if end < min(own, self._vocab_size))
                    if not ends:
                        raise ValueError("it has no end-of-sequence token, so no reply could end")
                    size = max(own, self._vocab_size)
                    self._tokens = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)
                except Exception as error:
                    raise refused(f"grammars do not work with this model's tokenizer: {error}") from error
                self._words = -(-size // 32)
            return self._tokens


def _reason(message: str) -> str:
    """The essential part of llguidance's message, without the grammar it quotes."""
    # llguidance reports every refusal as text alone: without codes, its known texts are matched.
    first, *more = message.strip().splitlines() or ["no reason given"]
    gist = first.rpartition("failed to compile JSON schema: ")[2]
    if "regex parse error" in gist:
        gist += "".join(f" {line.strip()}" for line in more if "|" not in line[:8] and line.strip(" ^"))
    if gist.startswith("oneOf constraints"):
        gist = "oneOf is not supported where its options may overlap; use anyOf"
    return gist[:300]
