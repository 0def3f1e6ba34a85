"""`skim ask`: a question about one or several text files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skim.cli.local import answer, opened
from skim.cli.parser import Parser, add_engine_settings, add_sampling
from skim.cli.reply import CUT, Piece, Reply
from skim.cli.settings import engine_settings
from skim.cli.sources import engine_config, gather
from skim.config import EngineConfig
from skim.errors import RequestError

if TYPE_CHECKING:
    from skim.engine.sequence import RequestMetrics
    from skim.sampling.params import SamplingParams

HELP = "answer a question about text files"
USAGE = "FILE... -q QUESTION [options]"


def configure(parser: Parser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="text file in UTF-8; - is standard input")
    parser.add_argument("-q", "--question", required=True, help="what to answer from the files")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: the answer, token counts and timings"
    )
    add_sampling(parser, max_tokens=256, temperature=0.0)
    add_engine_settings(parser, positional_model=False)


def run(args: argparse.Namespace) -> int:
    config = engine_config(gather(engine_settings(), args, os.environ))
    content = prompt_of(args.files, args.question)

    from skim.sampling.params import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    reply = Reply(quiet=args.json)
    metrics = ask(config, content, params, reply)
    if args.json:
        print(json.dumps(report(config.model.model, args.files, reply, metrics), ensure_ascii=False))
    else:
        print(summary(reply, metrics), file=sys.stderr)
    return 0


def ask(config: EngineConfig, content: str, params: SamplingParams, reply: Reply) -> RequestMetrics:
    """Fill `reply` with the model's answer to one message."""
    from skim.engine.sequence import Finished

    with opened(config) as llm:
        try:
            messages = [{"role": "user", "content": content}]
            for event in answer(llm, messages, params, silent=reply.quiet):
                if isinstance(event, Finished):
                    return event.metrics
                reply.add(Piece(event.text, event.finish_reason))
        finally:
            reply.end_line()
    raise AssertionError("an answer ended without saying so")


def prompt_of(files: Sequence[str], question: str) -> str:
    """The files' texts, under their names where there are several, and then the question."""
    if not question.strip():
        raise RequestError("--question is empty; ask something")
    if files.count("-") > 1:
        raise RequestError("standard input (-) is named twice, but can be read once")
    texts = [read_text(file) for file in files]
    if len(files) > 1:
        names = ["standard input" if file == "-" else file for file in files]
        texts = [f"File: {name}\n\n{text}" for name, text in zip(names, texts, strict=True)]
    return "\n\n".join([*texts, f"Question: {question}"])


def read_text(file: str) -> str:
    """The text in a file, or on standard input where the file is `-`."""
    name = "standard input" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not a text in UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror}") from error
    if not text:
        raise RequestError(f"{name} is empty; give a file with some text in it")
    return text


def summary(reply: Reply, metrics: RequestMetrics) -> str:
    """What was read, how long the first token took, how fast the others followed, and whether it was cut."""
    line = f"{metrics.prompt_tokens} prompt tokens, first token after {metrics.ttft_ms / 1e3:.2f} s"
    if metrics.generated_tokens > 1 and metrics.decode_ms > 0:
        line += f", then {(metrics.generated_tokens - 1) / metrics.decode_ms * 1e3:.1f} tokens/s"
    return f"{line}, {CUT}" if reply.was_cut else line


def report(model: str, files: Sequence[str], reply: Reply, metrics: RequestMetrics) -> dict[str, object]:
    """The same for machines."""
    return {
        "answer": reply.text,
        "finish_reason": reply.finish_reason,
        "model": model,
        "files": list(files),
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "generated_tokens": metrics.generated_tokens,
        "queue_ms": round(metrics.queue_ms, 3),
        "prefill_ms": round(metrics.prefill_ms, 3),
        "decode_ms": round(metrics.decode_ms, 3),
    }
