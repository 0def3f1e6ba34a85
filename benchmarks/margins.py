"""Slow-fast decode by margin, on real text: agreement with dense decode, and time per token of a reply.

    python benchmarks/margins.py [--n 8] [--tokens 64] [--context 7000] [--budget 1024] [--device cpu]

All modes share an engine and the cached prompt, a piece of a novel. Agreement is by teacher forcing: the
share of tokens at which a mode's likeliest token is also that of dense decode, over the next tokens of the
novel, and over the tokens that dense decode generates. Replies are greedy. `unsure` is the share of tokens
that a slow step computed because the fast step was not sure.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

from script import parser_of, positive, run, tell

from skim.config import DecodeConfig
from skim.engine.sequence import Delta, Finished, RequestMetrics
from skim.evals.haystack import Haystack
from skim.evals.run import forget
from skim.evals.teacher import compare, teacher_force
from skim.llm import LLM
from skim.measure.book import packaged_text
from skim.measure.modes import Mode, parse_mode
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

MARGINS = (0.0, 0.1, 0.2, 0.3, 0.5)


def modes(budget: int) -> list[Mode]:
    """Dense decode is first."""
    dense = replace(parse_mode("dense"), decode=DecodeConfig(slow_fast="off"))
    slow_fast = [f"slow-fast,decode_budget={budget},refresh_margin={margin}" for margin in MARGINS]
    slow_fast += [f"{slow_fast[i]},decode_candidates=1" for i in (0, MARGINS.index(0.2))]
    return [dense, *map(parse_mode, (*slow_fast, f"exact,decode_budget={budget}"))]


def reply(llm: LLM, prompt: tuple[int, ...], tokens: int, mode: Mode) -> tuple[list[int], RequestMetrics]:
    """A greedy reply: its tokens, and what it took."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    *deltas, last = llm.engine.submit(Request(prompt, params, mode.prefill, decode=mode.decode))
    assert isinstance(last, Finished)
    return [token for one in deltas if isinstance(one, Delta) for token in one.token_ids], last.metrics


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--n", type=positive, default=8, help="texts")
    parser.add_argument("--tokens", type=positive, default=64, help="of a text, and of a reply")
    parser.add_argument("--context", type=positive, default=7000)
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    haystack = Haystack(packaged_text())
    compared = modes(args.budget)
    agreed: dict[str, tuple[list[float], list[float]]] = {mode.name: ([], []) for mode in compared}
    times: dict[str, list[float]] = {mode.name: [] for mode in compared}
    unsure = dict.fromkeys(agreed, 0)
    with LLM(progress=False, device=args.device, kv_memory="2G", slow_fast="on") as llm:
        for number in range(args.n):
            sentences = haystack.sentences_from(random.Random(f"margins/{number}"))
            text: tuple[int, ...] = ()
            while len(text) < args.context:
                text += tuple(llm.encode(next(sentences) + " "))
            text = text[: args.context]
            prompt, rest = text[: -args.tokens], text[-args.tokens :]
            generated, _ = reply(llm, prompt, args.tokens, compared[0])
            references = [teacher_force(llm, prompt, forced, compared[0]) for forced in (rest, generated)]
            for mode in compared:
                for found, reference, forced in zip(
                    agreed[mode.name], references, (rest, generated), strict=True
                ):
                    found.append(compare(reference, teacher_force(llm, prompt, forced, mode))["score"])
                _, metrics = reply(llm, prompt, args.tokens, mode)
                times[mode.name].append(metrics.decode_ms / (args.tokens - 1))
                if (counts := metrics.decode) is not None:
                    unsure[mode.name] += counts.refreshes["margin"]
            forget(llm)
            tell(f"{number + 1} of {args.n} texts")
    print(f"n = {args.n} texts of {args.context:,} tokens, of which {args.tokens} are compared")
    for mode in compared:
        own, (of_text, of_replies) = times[mode.name], map(statistics.fmean, agreed[mode.name])
        print(
            f"{mode.name:66} {of_text:6.1%} of the text agree, {of_replies:6.1%} of the replies, "
            f"{statistics.median(own):6.2f} ms ({min(own):.2f}-{max(own):.2f}) a token, "
            f"{unsure[mode.name] / args.n / (args.tokens - 1):4.0%} unsure"
        )
    return 0


if __name__ == "__main__":
    run(main)
