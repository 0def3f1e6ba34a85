"""Grammars: replies follow them, and a grammar that cannot be compiled is refused quickly, with a reason."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import string
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skim import LLM
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Failed, Finished
from skim.errors import RequestError
from skim.sampling import Grammar, GrammarCompiler, Sampler, SamplerRow, SamplingParams, grammar
from tests import fake, tiny
from tests.fake import submit

CPU = torch.device("cpu")
VOCAB = 300  # more logits than tokens: 258 to 299 are unused
BYTES = tiny.tokenizer()
EOS = 257
COMPILER = GrammarCompiler(BYTES, VOCAB, {EOS})
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
POINT = {
    "type": "object",
    "properties": {"x": NUMBER, "y": NUMBER},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def open_row(sampler: Sampler, grammar: Grammar | None, seed: int = 0, **params: Any) -> SamplerRow:
    matcher = COMPILER.compile(grammar) if grammar is not None else None
    asked = SamplingParams(grammar=grammar, max_tokens=None, **params)
    return sampler.open(asked, (), seed=seed, eos_token_ids=[EOS], matcher=matcher)


def write(grammar: Grammar, seed: int = 0, most: int = 4000, **params: Any) -> str:
    """Text drawn from random logits until the grammar ends."""
    sampler, generator = Sampler(VOCAB, CPU), torch.Generator().manual_seed(seed)
    row = open_row(sampler, grammar, seed, **params)
    tokens: list[int] = []
    while len(tokens) < most:
        [result] = sampler.sample(torch.randn(1, VOCAB, generator=generator) * 2, [row])
        assert result.finite, result.error
        if result.token_id == EOS:
            return str(BYTES.decode(tokens))
        tokens.append(result.token_id)
    raise AssertionError(f"no end after {most} tokens: {BYTES.decode(tokens)[:200]}")


# --- replies

names = st.text(string.ascii_letters + '_ "\\é漢', min_size=1, max_size=6)
leaves = st.one_of(
    st.integers(-50, 50).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 40}),
    st.just({"type": "number", "minimum": 0, "maximum": 10}),
    st.just({"type": ["boolean", "null"]}),
    st.integers(0, 6).map(lambda n: {"type": "string", "maxLength": n}),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}$"}),
    st.lists(st.one_of(names, st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=5).map(
        lambda values: {"enum": values}
    ),
    names.map(lambda value: {"const": value}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4).map(
        lambda fields: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in fields.items()},
            "required": [name for name, (_, required) in fields.items() if required],
            "additionalProperties": False,
        }
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 2}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(schemas, st.integers(0, 1000))
def test_random_logits_give_json_that_follows_the_schema(schema: dict[str, Any], seed: int) -> None:
    value = json.loads(write(Grammar.json_schema(schema), seed, temperature=1.0))
    assert jsonschema_rs.is_valid(schema, value), (schema, value)


@pytest.mark.parametrize("settings_", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_every_way_to_choose_a_token_follows_the_grammar(settings_: dict[str, Any]) -> None:
    value = json.loads(write(Grammar.json_schema(POINT), 5, **settings_))
    assert jsonschema_rs.is_valid(POINT, value)


def test_penalties_and_bias_do_not_break_the_grammar() -> None:
    bias = dict.fromkeys(range(0, 258, 3), 100.0)
    text = write(Grammar.json_schema(POINT), 5, logit_bias=bias, repetition_penalty=1.9, presence_penalty=2)
    assert jsonschema_rs.is_valid(POINT, json.loads(text))


def test_json_is_compact_with_at_most_one_space_after_separators() -> None:
    schema = {"type": "array", "items": POINT, "minItems": 5, "maxItems": 5}
    text = write(Grammar.json_schema(schema), 1)
    assert not set(text) & set("\n\t\r")
    assert "  " not in text


def test_a_schema_may_be_given_as_text_and_true_means_any_json() -> None:
    assert Grammar.json_schema(json.dumps(POINT)) == Grammar.json_schema(POINT)
    assert Grammar.json_schema(True) == Grammar.json_schema({})
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})


def test_a_lark_grammar_and_schemas_named_in_it() -> None:
    text = write(Grammar.lark('start: "<" point ">" | "<" point ">!"', {"point": POINT}), 2)
    assert text[0] == "<"
    assert jsonschema_rs.is_valid(POINT, json.loads(text.strip("<>!")))


def test_a_known_property_cannot_be_written_under_an_escaped_name() -> None:
    """Otherwise llguidance would treat `"\\u0078"` as a property other than `x`."""
    matcher = COMPILER.compile(Grammar.json_schema({"type": "object", "properties": {"x": NUMBER}}))
    for byte in b'{"\\':
        matcher.consume(BYTES.encode(chr(byte))[0])
    assert "u" not in {BYTES.decode([token]) for token in allowed(matcher)}


def allowed(matcher: Any) -> list[int]:
    return (~grammar.forbidden_tokens([matcher], VOCAB, CPU)[0]).nonzero().flatten().tolist()


# --- batches


def test_rows_with_and_without_grammars_do_not_affect_each_other() -> None:
    kinds: list[tuple[Grammar | None, dict[str, Any]]] = [
        (None, {"temperature": 0}),
        (Grammar.json_schema(POINT), {"temperature": 0}),
        (None, {"top_p": 0.9, "logprobs": 2}),
        (Grammar.json_schema({"type": "array", "items": NUMBER}), {"logprobs": 3, "top_k": 40}),
        (Grammar.json_schema(POINT), {"repetition_penalty": 1.3}),
    ]
    generator = torch.Generator().manual_seed(4)
    steps = [torch.randn(len(kinds), VOCAB, generator=generator) * 2 for _ in range(12)]
    together = Sampler(VOCAB, CPU)
    rows = [open_row(together, kind, seed, **params) for seed, (kind, params) in enumerate(kinds)]
    batched = [together.sample(logits, rows) for logits in steps]
    for seed, (kind, params) in enumerate(kinds):
        alone = Sampler(VOCAB, CPU)
        row = open_row(alone, kind, seed, **params)
        for logits, results in zip(steps, batched, strict=True):
            assert alone.sample(logits[seed : seed + 1], [row]) == [results[seed]]


def test_logprobs_are_of_the_raw_logits() -> None:
    sampler, logits = Sampler(VOCAB, CPU), torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    row = open_row(sampler, Grammar.json_schema(POINT), temperature=0, logprobs=2)
    [result] = sampler.sample(logits, [row])
    assert BYTES.decode([result.token_id]) == "{"
    assert result.logprob == pytest.approx(float(logits.log_softmax(-1)[0, result.token_id]), abs=1e-5)
    assert result.top_logprobs is not None
    assert result.top_logprobs[0][0] == int(logits.argmax())


def test_at_its_end_a_grammar_allows_only_end_tokens() -> None:
    compiler = GrammarCompiler(BYTES, VOCAB, {EOS, 5, 256, 280})  # 280 has a logit but is not a token
    matcher = compiler.compile(Grammar.lark('start: "a"'))
    matcher.consume(BYTES.encode("a")[0])
    assert allowed(matcher) == [5, 256, EOS]
    for end in (5, 256, EOS):
        over = matcher.copy()
        over.consume(end)
        assert over.error is None


def test_the_logits_may_be_fewer_than_the_tokens() -> None:
    compiler = GrammarCompiler(BYTES, 250, {7})
    matcher = compiler.compile(Grammar.lark("start: /[a-z]+/"))
    assert grammar.forbidden_tokens([matcher], 250, CPU).shape == (1, 250)


def test_a_lexer_at_its_limit_fails_only_its_row_and_the_next_request_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 300)
    counting = Grammar.json_schema({"type": "string", "minLength": 900})
    other = Grammar.json_schema(POINT)
    sampler = Sampler(VOCAB, CPU)
    rows = [
        open_row(sampler, counting, temperature=0),
        open_row(sampler, None, temperature=0, presence_penalty=1),
        open_row(sampler, other, temperature=0),
    ]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    for _ in range(500):
        bad, plain, held = sampler.sample(logits, rows)
        assert plain.finite
        assert held.finite
        if bad.error is not None:
            break
        rows[2] = open_row(sampler, other, temperature=0)
    assert (bad.token_id, bad.finite) == (-1, False)
    assert "grammar matcher failed: lexer error: too many states" in str(bad.error)
    [again] = sampler.sample(logits[:1], [rows[0]])
    assert again.error == bad.error
    fresh = open_row(sampler, counting, temperature=0)
    assert sampler.sample(logits[:1], [fresh])[0].finite


# --- refusals


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def words(count: int) -> list[str]:
    return ["".join(t) for t in itertools.islice(itertools.product(string.ascii_lowercase, repeat=3), count)]


def chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    links = {str(i): link(f"#/$defs/{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(length): {"type": "null"}}}


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"^.*{word}.{{5}}x"} for word in words(count)]


REFUSED: dict[str, tuple[Any, str]] = {
    "deep": (nested(100), "nests deeper than 64 levels"),
    "deeper than Python": ('{"items":' * 100_000 + "{}" + "}" * 100_000, "has .* bytes"),
    "deeper than Python allows": ('{"items":' * 10_000 + "{}" + "}" * 10_000, "nests deeper than 64"),
    "huge enum": ({"enum": [f"value {i}" for i in range(20_000)]}, "has .* bytes; at most 131072"),
    "huge enum of objects": ({"enum": [{"a": [i]} for i in range(6000)]}, "6000 property names"),
    "huge enum of lists": ({"enum": [[i, i] for i in range(8000)]}, "grammar size"),
    "huge minLength": ({"type": "string", "minLength": 10**9}, "minLength must be at most 100000"),
    "huge minItems": ({"type": "array", "minItems": 10**9}, "minItems must be at most 100000"),
    "huge minProperties": (
        {"type": "object", "minProperties": 10**9},
        "minProperties must be at most 100000",
    ),
    "many properties": ({"properties": {w: {} for w in words(3000)}}, "3000 property names"),
    "many patternProperties": (
        {"type": "object", "patternProperties": {f"^{w}$": {} for w in words(400)}},
        "400 patternProperties; at most 64",
    ),
    "patterns for one string": ({"allOf": patterns(24)}, "24 patterns, formats and lengths to one string"),
    "patterns behind references": (
        chain(24, lambda target: {"$ref": target, "pattern": "^(.*a){5}x"}),
        "patterns, formats and lengths to one string",
    ),
    "conjunction of choices": (
        {"allOf": [{"anyOf": patterns(100)}, {"anyOf": patterns(100)}]},
        "10000 cases; at most 1000",
    ),
    "large multipleOf": ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf is too large"),
    "multipleOf together": (
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 1009)]},
        "multipleOf is too large",
    ),
    "references": (chain(1500, lambda target: {"properties": {"a": {"$ref": target}}}), "refs is too long"),
    "endless references": (chain(3, lambda target: {"$ref": "#/$defs/0"}), "matches no text"),
    "a reference to itself": ({"$ref": "#"}, "matches no text"),
    "a remote reference": (
        {"$ref": "http://example.com/schema.json"},
        "'http://example.com/schema.json' points",
    ),
    "a file reference": ({"$ref": "file:///etc/passwd"}, "'file:///etc/passwd' points outside"),
    "a remote draft": ({"$schema": "http://example.com/draft"}, "example.com/draft.*not.*fetch"),
    "a broken reference": ({"$ref": "#/$defs/zork"}, "zork"),
    "a reference to data": ({"default": {"a": {}}, "$ref": "#/default/a"}, "not a schema"),
    "a nested $id": ({"$defs": {"a": {"$id": "x:y"}}, "$ref": "#/$defs/a"}, r"\$id is not supported"),
    "options for llguidance": ({"x-guidance": {"lenient": True}}, "x-guidance is not supported"),
    "false": (False, "false, which no value satisfies"),
    "incompatible types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater"),
    "an impossible property": ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "'a'"),
    "an empty enum": ({"enum": []}, "Unsatisfiable"),
    "an enum of another type": ({"type": "integer", "enum": ["a"]}, "Unsatisfiable"),
    "a lookahead": ({"type": "string", "pattern": "^(?=a)b"}, r"\^\(\?=a\)b.*look-around"),
    "a backreference": ({"type": "string", "pattern": r"^(a)\1$"}, "backreferences are not supported"),
    "an unknown format": ({"type": "string", "format": "zork"}, "zork"),
    "overlapping oneOf": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    "an unknown type": ({"type": "zork"}, "zork"),
    "not JSON": ("{", "not valid JSON"),
    "not serializable": ({"enum": [object()]}, "not valid JSON"),
    "not a number": ({"minimum": float("nan")}, "not valid JSON"),
    "a list": ([1], "must be an object"),
    "half a character": ({"const": "\ud800"}, "grammar is refused"),
    **{
        f"keyword {keyword}": ({"type": "array", keyword: value}, f'"{keyword}"')
        for keyword, value in {
            "not": {},
            "if": {},
            "contains": {},
            "uniqueItems": True,
            "unevaluatedItems": False,
            "dependentRequired": {"a": ["b"]},
            "propertyNames": {},
            "unevaluatedProperties": False,
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_schema_is_refused_quickly_with_a_reason(name: str) -> None:
    schema, message = REFUSED[name]
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message):
        COMPILER.compile(Grammar.json_schema(schema))
    assert time.perf_counter() - start < 5


ACCEPTED: dict[str, Any] = {
    "huge maxLength": {"type": "string", "maxLength": 10**9},
    "huge maxItems": {"type": "array", "items": NUMBER, "maxItems": 10**9},
    "nested repetition": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "a forced megabyte": {"type": "string", "pattern": "^a{1000000}$"},
    "a forced gigabyte": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "forced items": {"type": "array", "items": {"const": 1}, "minItems": 100_000},
    "exponential states": {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
    "many alternatives": {"type": "string", "pattern": "|".join(words(8000))},
    "a large enum": {"enum": words(8000)},
    "optional properties": {"type": "object", "properties": {w: {} for w in words(1500)}},
    "a tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
    "a tree without end": {"type": "object", "properties": {"kid": {"$ref": "#"}}, "required": ["kid"]},
    "definitions in a row": chain(150, lambda target: {"properties": {"a": {"$ref": target}}}),
    "a percent-encoded reference": {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}},
    "prices": {"type": "object", "properties": {w: {"multipleOf": 0.01} for w in words(20)}},
    "keywords as names": {"type": "object", "properties": {"multipleOf": {}, "$ref": {}, "minItems": {}}},
    "keywords in data": {"enum": [{"minItems": 10**9, "$ref": "http://x", "multipleOf": 10**9}]},
    "a union told apart by a constant": {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
            for name in "AB"
        },
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_schema_that_looks_expensive_compiles_and_matches_quickly(name: str) -> None:
    start = time.perf_counter()
    matcher = COMPILER.compile(Grammar.json_schema(ACCEPTED[name]))
    rng = torch.Generator().manual_seed(0)
    slowest = 0.0
    for _ in range(60):
        before = time.perf_counter()
        tokens = allowed(matcher)
        slowest = max(slowest, time.perf_counter() - before)
        if matcher.error is not None or EOS in tokens:
            break
        matcher.consume(tokens[int(torch.randint(len(tokens), (1,), generator=rng))])
    assert slowest < 2
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: (", "refused"),
        ("start: unknown_rule", "unknown_rule"),
        ("root := a", r"refused: line 1, column \d+: "),
        ('start: "a"\n\n ( b', r"refused: line 3, column \d+: "),
        ("", "refused"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "deeply nested"),
        ('start: "a" ' + " " * 200_000, "at most 131072"),
        ('start: "\ud800"', "refused"),
    ],
)
def test_an_invalid_lark_grammar_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        COMPILER.compile(Grammar.lark(text))


@pytest.mark.parametrize("rules", [100, 3200])
def test_deep_chains_of_rules_do_not_overflow_the_compilers_stack(rules: int) -> None:
    """With the default stack size, 3200 rules would crash the process."""
    deep = "\n".join(f"t{i}: t{i + 1} t{i + 1}" for i in range(rules))
    COMPILER.compile(Grammar.lark(f'start: t0\n{deep}\nt{rules}: "a"'))


def test_compilation_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(GrammarCompiler, "_begin", lambda *_: go_on.wait(10))
    with pytest.raises(RequestError, match=r"took longer than 0\.05 s"):
        COMPILER.compile(Grammar.lark('start: "slow"'))
    go_on.set()


def test_a_grammar_is_compiled_once_for_many_threads_and_the_least_recently_used_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, compiled = GrammarCompiler(BYTES, VOCAB, {EOS}), []
    apart = GrammarCompiler._compile_in_thread

    def spy(self: GrammarCompiler, one: Grammar) -> Any:
        compiled.append(one)
        return apart(self, one)

    monkeypatch.setattr(GrammarCompiler, "_compile_in_thread", spy)
    kinds = [Grammar.lark(f'start: "{i}"') for i in range(grammar._MAX_CACHED)]
    for kind in kinds:
        compiler.compile(kind)
    with ThreadPoolExecutor(8) as threads:
        matchers = list(threads.map(compiler.compile, kinds * 5))
    assert len(compiled) == len(kinds)
    assert all(matcher.error is None for matcher in matchers)
    for kind in kinds:  # the threads left them in random order
        compiler.compile(kind)
    compiler.compile(Grammar.lark('start: "one more"'))
    compiler.compile(kinds[1])
    compiler.compile(kinds[0])
    assert compiled[len(kinds) :] == [Grammar.lark('start: "one more"'), kinds[0]]


@pytest.mark.parametrize("settings_", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_settings_that_move_the_end_are_refused_with_a_grammar(settings_: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(settings_))} cannot be used with a grammar"):
        SamplingParams(grammar=Grammar.json_object(), **settings_)


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        GrammarCompiler(BYTES, VOCAB, {EOS}).compile(Grammar.json_object())


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        GrammarCompiler(BYTES, VOCAB, ()).compile(Grammar.json_object())


# --- in the engine

CHARACTERS = '{}[]":,.-_' + string.digits + string.ascii_lowercase
LIST = Grammar.json_schema({"type": "array", "items": POINT, "minItems": 2, "maxItems": 4})


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, for the fake model's 64 tokens."""
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([f"<{i}>" for i in range(len(vocab), fake.EOS)])
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def spelling_engine(**settings: Any) -> Engine:
    engine = fake.fake_engine(**settings)
    return Engine(dataclasses.replace(engine.model, tokenizer=spelling_tokenizer()), engine.config)


def run(engine: Engine) -> None:
    while engine.step():
        engine.core.memory.check()


def replies(handle: RequestHandle, n: int = 1) -> list[str]:
    found = [handle.events.get() for _ in range(handle.events.qsize())]
    assert isinstance(found[-1], Finished)
    deltas = [event for event in found if isinstance(event, Delta)]
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"] * n
    return ["".join(d.text for d in deltas if d.index == index) for index in range(n)]


def assert_points(texts: Sequence[str]) -> None:
    for text in texts:
        points = json.loads(text)
        assert 2 <= len(points) <= 4
        assert all(jsonschema_rs.is_valid(POINT, point) for point in points)


def test_the_text_is_the_same_after_preemption() -> None:
    texts = []
    for blocks in (30, 500):
        engine = spelling_engine(blocks=blocks, max_num_batched_tokens=64)
        handles = [
            submit(engine, [i] * 9, SamplingParams(grammar=LIST, seed=i, max_tokens=90)) for i in range(4)
        ]
        free = submit(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=60))
        run(engine)
        texts.append([replies(handle)[0] for handle in handles])
        assert_points(texts[-1])
        tokens = [t for _ in range(60) for t in free.events.get().token_ids]  # type: ignore[union-attr]
        assert tokens == fake.continuation([1, 2, 3], 60)
        assert (engine.stats().preemptions > 0) == (blocks == 30)
    assert texts[0] == texts[1]


def test_each_of_n_sequences_follows_the_grammar_independently() -> None:
    engine = spelling_engine(blocks=200)
    handle = submit(engine, [1, 2, 3], SamplingParams(grammar=LIST, seed=3, n=4, max_tokens=90))
    run(engine)
    texts = replies(handle, n=4)
    assert_points(texts)
    assert len(set(texts)) > 1


def test_an_abort_frees_blocks_and_matchers() -> None:
    engine = spelling_engine(blocks=200, enable_prefix_caching=False)
    handle = submit(engine, [1, 2, 3], SamplingParams(grammar=LIST, n=3, max_tokens=90))
    other = submit(engine, [4, 5], SamplingParams(grammar=LIST, seed=1, max_tokens=90))
    for _ in range(4):
        engine.step()
    rows = [s.sampler_row for s in engine.core.lifecycle.requests[handle.id].sequences]
    matchers = [weakref.ref(row.matcher) for row in rows if row is not None and row.matcher is not None]
    assert len(matchers) == 3
    handle.abort()
    engine.step()
    gc.collect()
    assert [matcher() for matcher in matchers] == [None] * 3
    run(engine)
    assert_points(replies(other))
    assert engine.stats().pool.live == 0
    assert not engine.core.lifecycle.requests


def test_a_failed_matcher_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 300)
    engine = spelling_engine(blocks=600)
    counting = Grammar.json_schema({"type": "string", "minLength": 900})
    doomed = submit(engine, [1], SamplingParams(grammar=counting, max_tokens=1500, n=2))
    other = submit(engine, [2], SamplingParams(grammar=LIST, max_tokens=90))
    run(engine)
    events = [doomed.events.get() for _ in range(doomed.events.qsize())]
    assert isinstance(events[-1], Failed)
    assert "the grammar matcher failed: lexer error" in str(events[-1].error)
    assert_points(replies(other))
    assert engine.stats().outcomes == {"error": 1, "stop": 1}
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_tokenizer_that_llguidance_cannot_read_is_refused_at_submit() -> None:
    engine = fake.fake_engine(blocks=20)
    with pytest.raises(RequestError, match="grammars do not work with this model's tokenizer"):
        submit(engine, [1], SamplingParams(grammar=Grammar.json_object()))
    run(engine)
    assert not engine.core.lifecycle.requests


def test_a_bad_schema_is_refused_at_submit_and_queues_nothing() -> None:
    engine = spelling_engine(blocks=20)
    with pytest.raises(RequestError, match='"not"'):
        submit(engine, [1], SamplingParams(grammar=Grammar.json_schema({"not": {}})))
    assert not engine.step()


# --- on the real model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "hobbies", "mood"],
    "additionalProperties": False,
}


def test_random_logits_over_a_real_vocabulary_follow_the_schema(default_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    compiler, size = GrammarCompiler(tokenizer, len(tokenizer) + 40, {0, 2}), len(tokenizer) + 40
    text = {"type": "string", "maxLength": 30}
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": text, "hobbies": {"items": text}}}
    held = Grammar.json_schema({"type": "array", "items": schema, "minItems": 1, "maxItems": 2})
    sampler, generator = Sampler(size, CPU), torch.Generator().manual_seed(0)
    for seed in range(5):
        row = sampler.open(
            SamplingParams(grammar=held), (), seed=seed, eos_token_ids={0, 2}, matcher=compiler.compile(held)
        )
        tokens: list[int] = []
        while not {0, 2} & set(tokens):
            tokens.append(sampler.sample(torch.randn(1, size, generator=generator), [row])[0].token_id)
            assert len(tokens) < 4000
        assert all(jsonschema_rs.is_valid(schema, v) for v in json.loads(tokenizer.decode(tokens[:-1])))


@pytest.fixture(scope="module")
def llm(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(default_model_dir, progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_default_model_answers_in_json(llm: LLM, temperature: float) -> None:
    question = [{"role": "user", "content": "Describe Anna, who is 31 and likes chess. Answer in JSON."}]
    params = SamplingParams(
        grammar=Grammar.json_schema(PERSON), temperature=temperature, max_tokens=300, seed=3, n=2
    )
    [output] = llm.chat(question, params, use_tqdm=False)
    for one in output.outputs:
        assert one.finish_reason == "stop"
        assert jsonschema_rs.is_valid(PERSON, json.loads(one.text)), one.text


def test_a_grammar_does_not_change_the_text_of_other_rows(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    [alone] = llm.generate("The capital of France is", greedy, use_tqdm=False)
    held = SamplingParams(temperature=0, max_tokens=40, grammar=Grammar.json_schema(POINT))
    both = llm.generate(["The capital of France is", "A point:"], [greedy, held], use_tqdm=False)
    assert both[0].outputs[0].text == alone.outputs[0].text
    assert jsonschema_rs.is_valid(POINT, json.loads(both[1].outputs[0].text))
