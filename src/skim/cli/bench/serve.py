"""`skim bench serve`: put load on any running server with OpenAI's API."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from skim.bench.load import Target
from skim.bench.prompts import SYNTAX, parse_lengths
from skim.bench.serve import Load, Measured, measure
from skim.bench.serve_figures import listing
from skim.cli.bench.common import Files, report_failures
from skim.cli.settings.parser import Parser
from skim.errors import ConfigError
from skim.measure.report import Report, make_report
from skim.progress import progress

HELP = "put load on a running server with OpenAI's API and time its streams"
USAGE = "URL (--concurrency N... | --request-rate R...) [options]"
KEY = "SKIM_API_KEY"
WARM = 0.1  # share of prompt tokens cached beyond the shared prefix, above which a server counts as warm


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: TTFT, TPOT, ITL and throughput as `vllm bench serve` defines them. "
        "The server may be Skim's, llama.cpp's, vLLM's or another; it must count tokens in its streams "
        "(`usage`). Each combination of --concurrency or --request-rate with --prompt-tokens is a row. One "
        f"failed request fails its row, and the exit code is 1. The server's API key is read from {KEY}."
    )
    parser.epilog = (
        "Servers cache prompts that they have read. To run the same load cold again, give another --seed."
    )
    parser.add_argument("url", metavar="URL", help="the server, as in http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model to use (default: the first one listed)")
    parser.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="endpoint: plain prompts, or prompts as a user message (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=int, default=32, metavar="N", help="requests per row (default: %(default)s)"
    )
    when = parser.add_mutually_exclusive_group(required=True)
    when.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="clients that each send requests in sequence"
    )
    when.add_argument(
        "--request-rate", type=float, nargs="+", metavar="R", help="requests per second, Poisson arrivals"
    )
    parser.add_argument(
        "--prompt-tokens",
        nargs="+",
        default=["512"],
        metavar="LENGTHS",
        help=f"approximate prompt lengths: {SYNTAX} (default: 512)",
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum reply tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--shared-prefix",
        type=float,
        default=0.0,
        metavar="X",
        help="fraction of each prompt that is a prefix shared by all (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="request replies of full length; a row fails if the server does not support it",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="runs of each load, with new texts; rates show their range (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of texts, lengths and arrivals (default: 0)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="seconds without a byte before a request fails (default: %(default)g)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report to FILE")
    parser.add_argument("--html", metavar="FILE", help="write a page with the table and plots to FILE")


def run(args: argparse.Namespace) -> int:
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {args.timeout:g}")
    target = Target(
        args.url, args.api, args.model, os.environ.get(KEY) or None, args.ignore_eos, args.timeout
    )
    loads = loads_of(args)
    files = Files.of(args)
    with progress(f"{len(loads)} x {args.requests * args.repeats} requests to {target.shown}"):
        found = measure(target, loads)
    report = report_of(args, target, loads, found)
    print(f"$ {shlex.join(report.command)}")
    print(listing(report.rows))
    for line in remarks(args, found):
        print(line, file=sys.stderr)
    files.write(report)
    return report_failures(report)


def loads_of(args: argparse.Namespace) -> list[Load]:
    """A load for each combination of lengths, concurrency and rate."""
    return [
        Load(
            parse_lengths(lengths),
            requests=args.requests,
            output_tokens=args.output_tokens,
            concurrency=concurrency,
            request_rate=rate,
            shared_prefix=args.shared_prefix,
            repeats=args.repeats,
            seed=args.seed,
        )
        for lengths in dict.fromkeys(args.prompt_tokens)
        for concurrency in dict.fromkeys(args.concurrency or [None])
        for rate in dict.fromkeys(args.request_rate or [None])
    ]


def report_of(args: argparse.Namespace, target: Target, loads: list[Load], found: Measured) -> Report:
    settings = {
        "url": target.shown,
        "model": found.model,
        **{name: getattr(args, name) for name in ("api", "requests", "repeats", "shared_prefix", "seed")},
        "ignore_eos": args.ignore_eos,
    }
    return make_report("bench serve", command_of(args, target), settings, found.rows, expected=len(loads))


def command_of(args: argparse.Namespace, target: Target) -> list[str]:
    """The command line that repeats the run, without a password and without its output files."""
    found = ["skim", "bench", "serve", target.shown]
    for name in ("model", "api", "requests", "concurrency", "request_rate", "prompt_tokens", "output_tokens"):
        value = getattr(args, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name.replace('_', '-')}", *map(str, values)]
    for name in ("shared_prefix", "repeats", "seed", "timeout"):
        found += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return found + ["--ignore-eos"] * args.ignore_eos


def remarks(args: argparse.Namespace, found: Measured) -> list[str]:
    """The derivation of prompt lengths, and a warning if the server had the prompts cached."""
    lines = []
    if found.scale is not None:
        lines.append(
            f"prompts are English prose cut by characters: {1 / found.scale.per_char:.2f} characters per "
            f"token and {found.scale.overhead:.0f} tokens around each prompt, measured with two requests "
            "before the load"
        )
    for row in found.rows:
        cached = row.figures.get("cached")
        if found.scale is None or cached is None:
            continue
        around = found.scale.overhead / row.figures["prompt_tokens"].value
        if cached.value > args.shared_prefix + around + WARM:
            lines.append(
                f"warm: the server had {cached.value:.0%} of the prompts cached, more than the shared "
                f"{args.shared_prefix:.0%}; give another --seed for a cold run"
            )
    return lines
