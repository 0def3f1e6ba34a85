"""The scorers of one engine, made when they are first asked for: over the target's module or a drafter's.

The one that is configured is made at start too, to see that it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from skim.errors import ConfigError
from skim.models.load import LoadedModel
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scorers.cascade import CascadeScorer, SumScorer
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scorers.random import RandomScorer
from skim.prefill.scoring.calibration import FILE_NAME, Calibration, default_calibration, shipped
from skim.prefill.scoring.drafter import Drafter
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.task import Scorer
from skim.prefill.scoring.texts import decoder_of, starts_of
from skim.tokenization import OffsetsError, encode_with_offsets


def make_scorers(target: LoadedModel, drafter: LoadedModel | None) -> Callable[[str], Scorer]:
    """Scorers by name. Without a drafter the target scores for itself; `self` always does."""
    reader = drafter or target

    @cache
    def draft() -> Drafter:
        made = Drafter(reader.module, reader.tokenizer, target.tokenizer)
        if not made.shares_tokens:
            _check_offsets("drafter", reader)
            _check_offsets("model", target)
        return made

    def lexical() -> LexicalScorer:
        return LexicalScorer(decoder_of(target.tokenizer), lambda: starts_of(target.tokenizer))

    makers: dict[str, Callable[[], Scorer]] = {
        "lexical": lexical,
        "self": lambda: AttentionScorer(target.module, calibration_of(target), name="self"),
        "attention": lambda: draft().attention(calibration_of(reader)),
        "full": lambda: draft().full(reader.layers, calibration_of(reader)),
        "entropy": lambda: draft().entropy(),
        "random": RandomScorer,
        "cascade": lambda: CascadeScorer(
            SumScorer(lexical(), EmbeddingScorer(target.module)),
            draft().attention(calibration_of(reader)),
        ),
    }
    return cache(lambda name: makers[name]())


def check_scorer(name: str, target: LoadedModel, drafter: LoadedModel | None) -> None:
    """Make the scorer `name` once; what is wrong with it or with its drafter is a ConfigError.

    A scorer that fails while a prompt waits only means that the prompt is read in full. For the one that was
    configured this would be so at every prompt, and should be known before the first.

    It is made in a thread that ends with it: OpenMP keeps workers for every thread that has computed.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="skim-scorer") as thread:
            thread.submit(make_scorers(target, drafter), name).result()
    except ConfigError as error:
        raise ConfigError(f"the scorer {name!r} cannot be used: {error}; or set another scorer") from error


def calibration_of(model: LoadedModel) -> Calibration:
    """What was measured for this model here, or what is shipped for it, or the stated default."""
    text = model.module.config.get_text_config()
    own = model.path / FILE_NAME
    if own.is_file():
        found = Calibration.load(own)
        try:
            found.check_fits(text.num_hidden_layers, text.num_attention_heads)
        except ConfigError as error:
            raise ConfigError(f"{own}: {error}") from error
        return found
    return shipped(model.name) or default_calibration(text.num_hidden_layers)


def _check_offsets(role: str, model: LoadedModel) -> None:
    """Raise a ConfigError unless its tokenizer tells which characters a token stands for."""
    try:
        encode_with_offsets(model.tokenizer, "a text")
    except OffsetsError as error:
        raise ConfigError(
            f"the {role} {model.name} has a tokenizer that knows no character offsets, which are needed "
            f"where drafter and model have different tokens; choose a {role} with a tokenizer.json, or a "
            "drafter of the model's family"
        ) from error
