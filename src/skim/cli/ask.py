"""`skim ask`: a question about files and directories."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skim.cli.documents import Source, names_of, read_sources
from skim.cli.files import check_utf8
from skim.cli.local import answer, opened
from skim.cli.reply import CUT, Piece, Reply
from skim.cli.settings.fields import engine_settings
from skim.cli.settings.parser import Parser, add_engine_settings, add_sampling, max_tokens_of
from skim.cli.settings.sources import Found, engine_config, gather
from skim.config import EngineConfig
from skim.errors import RequestError

if TYPE_CHECKING:
    from skim.engine.sequence import Finished, RequestMetrics
    from skim.sampling.params import SamplingParams

HELP = "answer a question about files"
USAGE = "FILE... -q QUESTION [options]"
MAX_TOKENS = 256
SPARSE_PREFILL = "auto"


def configure(parser: Parser) -> None:
    parser.description = f"{HELP[0].upper()}{HELP[1:]}. Long prompts are skimmed."
    add_files(parser, "question to answer from the files")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: the answer, token counts and timings"
    )
    add_sampling(parser, max_tokens=MAX_TOKENS, temperature=0.0)
    add_engine_settings(parser, positional_model=False, sparse_prefill=SPARSE_PREFILL)


def add_files(parser: Parser, question: str) -> None:
    """The files and the question, with the help of `question`."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="text, PDF or HTML file, directory (without files that git ignores), or pattern such as "
        "'src/**/*.py'; - is standard input",
    )
    parser.add_argument("-q", "--question", required=True, help=question)
    parser.add_argument(
        "--encoding", metavar="NAME", help="encoding of texts that are not in UTF-8 (default: detected)"
    )


def run(args: argparse.Namespace) -> int:
    found = gather(engine_settings(), args, os.environ)
    config = engine_config({"sparse_prefill": Found(SPARSE_PREFILL, "skim ask"), **found})
    sources = asked_sources(args)
    messages = messages_about(sources, args.question)

    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=max_tokens_of(args))
    reply = Reply(quiet=args.json)
    done = ask(config, messages, params, reply)
    if args.json:
        print(json.dumps(report(config.model.model, names_of(sources), reply, done), ensure_ascii=False))
    else:
        print(summary(reply, done), file=sys.stderr)
    return 0


def ask(
    config: EngineConfig, messages: Sequence[Mapping[str, Any]], params: SamplingParams, reply: Reply
) -> Finished:
    """Fill `reply` with the model's answer. Returns the final event with its metrics."""
    from skim.engine.sequence import Finished

    with opened(config) as llm:
        try:
            for event in answer(llm, messages, params, prefill=config.prefill, silent=reply.quiet):
                if isinstance(event, Finished):
                    return event
                reply.add(Piece(event.text, event.finish_reason))
        finally:
            reply.end_line()
    raise AssertionError("an answer ended without a final event")


def asked_sources(args: argparse.Namespace) -> list[Source]:
    """The texts that a command names. Raises a RequestError for a file or a question that cannot be used."""
    if not args.question.strip():
        raise RequestError("--question is empty; ask something")
    check_utf8(args.question, "--question")
    return read_sources(args.files, args.encoding)


def messages_about(sources: Sequence[Source], question: str) -> list[dict[str, Any]]:
    """One message. Document and question are separate parts, so that only the document is skimmed."""
    return [{"role": "user", "content": parts_about(sources, f"Question: {question}")}]


def parts_about(sources: Sequence[Source], question: str) -> list[dict[str, str]]:
    """The content parts of a message: the texts, with names if there are several, and the question."""
    texts = [source.text for source in sources]
    if len(sources) > 1:
        texts = [f"File: {source.name}\n\n{source.text}" for source in sources]
    document = "\n\n".join(texts) + "\n"  # parts are joined by a newline: a blank line before the question
    return [{"type": "text", "text": text} for text in (document, question)]


def summary(reply: Reply, done: Finished) -> str:
    """Tokens read, time to first token, decode speed, and a remark if the reply was cut off."""
    metrics = done.metrics
    line = f"{metrics.prompt_tokens} prompt tokens, {read_of(done)}, "
    if metrics.restored_tokens:
        line += f"{metrics.restored_tokens} from checkpoints, "
    line += f"first token after {metrics.ttft_ms / 1e3:.2f} s"
    if metrics.scoring_ms:
        line += f" (scoring {metrics.scoring_ms / 1e3:.2f} s)"
    if metrics.generated_tokens > 1 and metrics.decode_ms > 0:
        line += f", then {(metrics.generated_tokens - 1) / metrics.decode_ms * 1e3:.1f} tokens/s"
    if metrics.decode is not None:
        line += f" ({metrics.decode.in_words()})"
    return f"{line}, {CUT}" if reply.was_cut else line


def read_of(done: Finished) -> str:
    """The part of the prompt that was read: `2048 read (1.6%, 31 spans, blend)`."""
    metrics, plan = done.metrics, done.plan
    if plan is None:
        return f"all read ({metrics.fallback})" if metrics.fallback else "all read"
    return f"{metrics.kept_tokens} read ({_ratio(metrics):.1%}, {plan.span_count}, {plan.scorer})"


def report(model: str, files: Sequence[str], reply: Reply, done: Finished) -> dict[str, object]:
    """The summary as JSON data. Without a plan, `spans` is None: the whole prompt was read."""
    metrics, plan = done.metrics, done.plan
    return {
        "answer": reply.text,
        "finish_reason": reply.finish_reason,
        "model": model,
        "files": list(files),
        "prompt_tokens": metrics.prompt_tokens,
        "kept_tokens": metrics.kept_tokens,
        "ratio": _ratio(metrics),
        "spans": None if plan is None else [dataclasses.asdict(span) for span in plan.spans],
        "scorer": metrics.scorer,
        "fallback": metrics.fallback,
        "cached_tokens": metrics.cached_tokens,
        "generated_tokens": metrics.generated_tokens,
        "queue_ms": round(metrics.queue_ms, 3),
        "scoring_ms": round(metrics.scoring_ms, 3),
        "prefill_ms": round(metrics.prefill_ms, 3),
        "decode_ms": round(metrics.decode_ms, 3),
        "decode": None if metrics.decode is None else metrics.decode.as_json(),
    }


def _ratio(metrics: RequestMetrics) -> float:
    return metrics.kept_tokens / metrics.prompt_tokens
