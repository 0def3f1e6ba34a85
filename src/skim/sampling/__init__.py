"""Turns logits into tokens, and tokens into text. Knows nothing about models, memory or requests."""

from skim.sampling.batch import SamplerRow
from skim.sampling.grammar import Grammar, GrammarCompiler, Matcher
from skim.sampling.logprobs import Sampled
from skim.sampling.params import SamplingParams
from skim.sampling.sampler import Sampler
from skim.sampling.stop import Detokenizer, StopChecker

__all__ = [
    "Detokenizer",
    "Grammar",
    "GrammarCompiler",
    "Matcher",
    "Sampled",
    "Sampler",
    "SamplerRow",
    "SamplingParams",
    "StopChecker",
]
