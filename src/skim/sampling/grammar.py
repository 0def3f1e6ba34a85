"""Grammars that hold a reply to a shape, compiled by llguidance, and where a sequence stands in one.

A grammar is compiled when its request is submitted, on the caller's thread, so that a grammar that is wrong
or too large is refused at once and the engine's loop never waits for a compiler. The loop only asks for the
tokens that may come next and says which one came: tens of microseconds a token, limited to tens of
milliseconds for grammars made to be slow.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skim.device import to_device
from skim.errors import RequestError
from skim.sampling.schema import MAX_BYTES, Schema, check_schemas

COMPILE_SECONDS = 5.0
"""A compilation that takes longer is given up. None is known that does, with the limits of `schema.py`."""

_KEPT = 16  # compiled grammars; each may grow to about 50 MB of lexer states
_STACK_BYTES = 2**28  # address space, mostly unused: the compiler recurses, and overflowing kills the process
_LIMITS = {
    "max_grammar_size": 20_000,
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 100_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
_stack_size_lock = threading.Lock()  # the size is one setting for the whole process
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Forced text is not computed ahead: nobody here asks for it, and `a{1000000}` forces a megabyte."""
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""At most one space after a comma or colon: left free, small models write white space until they are cut off.
No \\u escapes, by which a key could pass for another one's name; characters are written as they are."""


@dataclass(frozen=True)
class Grammar:
    """What a reply has to look like. Equal sources are equal grammars, and compiled once."""

    source: str
    """The grammar in llguidance's dialect of Lark; its first rule to match is `start`."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise RequestError(f"a grammar must be a text, got {type(self.source).__name__}")
        if len(self.source) > MAX_BYTES:
            raise RequestError(
                f"the grammar has {len(self.source)} characters; at most {MAX_BYTES} are supported"
            )

    @classmethod
    def json_schema(cls, schema: Schema) -> Grammar:
        """JSON that follows a schema, given as JSON text or as the object it means.

        Keywords that llguidance cannot enforce are refused by name when the request is submitted. Properties
        come in the schema's order; JSON is compact but for single spaces after commas and colons.
        """
        return cls.lark("", {"start": schema})

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def lark(cls, text: str, schemas: Mapping[str, Schema] | None = None) -> Grammar:
        """A Lark grammar; each of `schemas` becomes a rule of that name that matches JSON following it.

        Schemas written into the text itself with `%json` are not checked for cost beyond llguidance's limits.
        """
        named = schemas or {}
        rules = [
            f"{name}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
            for name, schema in zip(named, check_schemas(named.values()), strict=True)
        ]
        return cls("\n".join([text, *rules] if text else rules))


class Matcher:
    """Where one sequence stands in its grammar. Not safe to use from several threads at once."""

    def __init__(self, inner: Any, words: int) -> None:
        self._inner = inner
        self.words = words
        """Words of 32 tokens in its masks: at least as many as the model has."""
        self.error: str | None = None
        """Why it cannot go on. From then on no token is allowed."""

    def copy(self) -> Matcher:
        """Another one at the same place, to go its own way."""
        return Matcher(self._inner.deep_copy(), self.words)

    def fill(self, words: Tensor) -> None:
        """Write a bit for every token, set if it may come next, into the int32 `words`, on the host.

        At the grammar's end these are the end-of-sequence tokens alone.
        """
        if self.error is None:
            self._inner.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
            self._note_error()
        if self.error is not None:
            words.zero_()

    def consume(self, token_id: int) -> None:
        """Go past a token that was allowed."""
        if self.error is None:
            self._inner.consume_token(token_id)
            self._note_error()

    def _note_error(self) -> None:
        if self._inner.is_error():
            self.error = f"the grammar cannot be followed any further: {_reason(self._inner.get_error())}"


def forbidden_tokens(matchers: Sequence[Matcher], vocab_size: int, device: torch.device) -> Tensor:
    """bool [matchers, vocab], on the device: the tokens that may not come next. One copy carries them all."""
    words = max(matcher.words for matcher in matchers)
    masks = torch.zeros(len(matchers), words, dtype=torch.int32)
    for mask, matcher in zip(masks, matchers, strict=True):
        matcher.fill(mask[: matcher.words])
    packed = to_device(masks, device).view(torch.uint8)  # [matchers, bytes]
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    bits = (packed[:, :, None] >> shifts) & 1  # [matchers, bytes, 8]
    return bits.flatten(1)[:, :vocab_size] == 0


class GrammarCompiler:
    """Compiles grammars for one model's tokens. Safe to use from several threads.

    The tokenizer is read when the first grammar comes, which takes about a second. Sequences of equal
    grammars share a lexer that is built as it is used, so later ones find it ready; a lexer that one of them
    fills to its limit is of no use to the others, and the next request gets a new one.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens: Any = None  # llguidance's view of the tokenizer
        self._words = 0  # of 32 tokens, in one mask
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start; a RequestError if there is nothing that it can match."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is not None and (matcher := self._begin(known)).error is None:
            with self._lock:
                if grammar in self._compiled:
                    self._compiled.move_to_end(grammar)
            return matcher
        compiled, matcher = self._compile_apart(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _begin(self, compiled: Any) -> Matcher:
        """A matcher at the start. Asked once for its tokens, it knows whether there are any, and whether the
        lexer it shares is still whole."""
        matcher = Matcher(compiled.deep_copy(), self._words)
        matcher.fill(torch.empty(self._words, dtype=torch.int32))
        return matcher

    def _compile_apart(self, grammar: Grammar) -> tuple[Any, Matcher]:
        """Compile in a thread with a large stack, and wait for it for `COMPILE_SECONDS` at most."""
        tokens = self._read_tokenizer()
        done: list[tuple[Any, Matcher] | BaseException] = []

        def work() -> None:
            from llguidance import LLMatcher, LLParserLimits

            limits = LLParserLimits(**_LIMITS)
            try:
                compiled = LLMatcher(tokens, _HEADER + grammar.source, log_level=0, limits=limits)
                done.append((compiled, self._begin(compiled)))
            except BaseException as error:  # a panic of the compiler is no Exception
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
            raise RequestError(f"the grammar is not compiled after {COMPILE_SECONDS:g} s; simplify it")
        if isinstance(done[0], BaseException):
            raise RequestError(f"the grammar cannot be compiled: {_reason(str(done[0]))}") from done[0]
        compiled, matcher = done[0]
        if compiled.is_error():
            raise RequestError(f"the grammar is refused: {_reason(compiled.get_error())}")
        if matcher.error is not None:
            raise RequestError("the grammar is refused: there is no text that it matches")
        return compiled, matcher

    def _read_tokenizer(self) -> Any:
        with self._tokens_lock:
            if self._tokens is None:
                try:
                    from llguidance.hf import from_tokenizer
                except ImportError as error:
                    raise RequestError(
                        "grammars need the package llguidance, which is not installed: pip install llguidance"
                    ) from error
                try:
                    own = max(self._tokenizer.get_vocab().values()) + 1
                    ends = sorted(end for end in self._eos_token_ids if end < min(own, self._vocab_size))
                    if not ends:
                        raise ValueError("it has no end-of-sequence token, so that no reply could end")
                    size = max(own, self._vocab_size)
                    self._tokens = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)
                except Exception as error:
                    raise RequestError(f"this model's tokenizer cannot follow grammars: {error}") from error
                self._words = -(-size // 32)
            return self._tokens


def _reason(message: str) -> str:
    """The gist of llguidance's message, without the grammar it quotes."""
    first, *more = message.strip().splitlines() or ["no reason given"]
    gist = first.rpartition("failed to compile JSON schema: ")[2]
    if gist.startswith("regex parse error"):
        gist += "".join(f" {line.strip()}" for line in more if "|" not in line[:8] and line.strip(" ^"))
    if gist.startswith("oneOf constraints"):
        gist = "oneOf is not supported where its options may overlap; use anyOf"
    return gist[:300]
