"""`skim plan`: show the prefill plan for a question about files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from skim.cli.ask import MAX_TOKENS, add_files, asked_sources, messages_about
from skim.cli.documents import Source, names_of
from skim.cli.files import check_target, write_whole
from skim.cli.heatmap import heat_map
from skim.cli.local import opened
from skim.cli.plan_page import page
from skim.cli.settings.fields import engine_settings
from skim.cli.settings.parser import Parser, add_engine_settings
from skim.cli.settings.sources import Found, engine_config, gather
from skim.cli.shown import Shown, shown_of
from skim.cli.terminal import columns, may_colour
from skim.config import EngineConfig, PrefillConfig
from skim.errors import ConfigError, EngineError, RequestError
from skim.prefill.plan import DenseReason
from skim.progress import progress

HELP = "show the prefill plan for a question about files"
USAGE = "FILE... -q QUESTION [options]"
SPARSE_PREFILL = "always"

_CAUSES = {
    DenseReason.SHORT: (
        "the prompt has no more than one block; give a longer document, or lower --prefill-block-size"
    ),
    DenseReason.NO_QUESTION: "nothing in the prompt asks; give a question with --question",
    DenseReason.UNMAPPABLE: "the document and the question cannot be located in the chat template's output",
    DenseReason.NON_FINITE: "the scorer gave scores that are not finite; try another --scorer",
    DenseReason.OUT_OF_MEMORY: "the scorer ran out of memory; try --scorer lexical",
}
# Failures of the scorer; the other reasons are due to the prompt.
_MISHAPS = (DenseReason.NON_FINITE, DenseReason.OUT_OF_MEMORY, DenseReason.SCORER_FAILED)


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: a heat map of the prompt, and the spans that are kept. Nothing is "
        "generated. The prompt is that of skim ask."
    )
    add_files(parser, "question about the files")
    parser.add_argument("--html", metavar="FILE", help="write a page with the prompt shaded by score to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the plan and its spans")
    add_engine_settings(parser, positional_model=False, sparse_prefill=SPARSE_PREFILL)


def run(args: argparse.Namespace) -> int:
    config = planning_config(gather(engine_settings(), args, os.environ))
    sources = asked_sources(args)
    target = None if args.html is None else check_target("--html", args.html, names_of(sources))
    shown = make(config, sources, args.question)
    if args.json:
        about = {"model": config.model.model, "files": names_of(sources)}
        print(json.dumps({**about, **report(shown)}, ensure_ascii=False))
    else:
        print("\n".join(lines(shown, width=columns(), colour=may_colour())))
    if target is not None:
        title = f"skim plan {' '.join(args.files)}"
        write_whole(target, page(shown, title=title, question=args.question))
        print(f"the page is in {args.html}", file=sys.stderr)
    return 0


def planning_config(found: dict[str, Found]) -> EngineConfig:
    """The configured settings, with `sparse_prefill` defaulting to `always`. Raises if it is `off`."""
    given = found.get("sparse_prefill")
    if given is None:
        return engine_config({**found, "sparse_prefill": Found(SPARSE_PREFILL, "skim plan")})
    config = engine_config(found)
    if config.prefill.sparse_prefill == "off":
        raise ConfigError(
            "sparse_prefill is off, so there is no plan to show; set it to always or auto",
            fields="sparse_prefill",
        )
    return config


def make(config: EngineConfig, sources: Sequence[Source], question: str) -> Shown:
    """The plan for a question about texts. Raises with the reason if the whole prompt would be read."""
    messages = messages_about(sources, question)
    with opened(config) as llm:
        with progress("planning"):
            prompt, planned = llm.plan(messages, prefill=config.prefill, max_tokens=MAX_TOKENS)
        check_length(config.prefill, len(prompt.tokens))
        if planned.plan is None:
            cause = planned.problem or "no plan was made"
            if planned.fallback is not None:
                cause = _CAUSES.get(planned.fallback, cause)
            read = "all of the prompt would be read"
            if len(prompt.tokens) >= llm.engine.core.max_model_len:
                read = (
                    f"there is no plan, and the prompt of {len(prompt.tokens)} tokens does not fit the "
                    "context window"
                )
            kind = EngineError if planned.fallback in _MISHAPS else RequestError
            raise kind(f"{read} ({planned.fallback}): {cause}")
        return shown_of(llm, prompt, planned.plan, sources)


def check_length(prefill: PrefillConfig, tokens: int) -> None:
    if not prefill.skims(tokens):
        raise RequestError(
            f"all of the prompt would be read: it has {tokens} tokens, and `auto` skims prompts of at "
            f"least {prefill.min_prompt_tokens}; use --sparse-prefill always, or lower --min-prompt-tokens"
        )


def lines(shown: Shown, *, width: int, colour: bool) -> list[str]:
    """The terminal output: figures, the heat map, and the kept passages with their lines and excerpts."""
    plan = shown.plan
    coverage = "" if plan.coverage is None else f", {plan.coverage:.1%} of the score"
    found = [
        plan.summary(),
        f"{plan.kept_tokens} of {plan.prompt_tokens} tokens, {plan.positions} positions{coverage}",
        "for:",
        *excerpt(shown.question, width),
        "",
        *heat_map(plan, width=width, colour=colour, label=shown.label),
    ]
    for span in plan.spans:
        found += ["", f"{shown.place(span)} {span.reason}", *excerpt(shown.text(span), width)]
        if (best := shown.best(span)) is not None:
            found += [f"  best {shown.place(best)}:", *excerpt(shown.text(best), width)]
    return found


def excerpt(text: str, width: int) -> list[str]:
    """The beginning and end of a text on at most two lines, without control characters."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    words = " ".join(plain.split())
    room = max(width, 20) - len("  ") - len(" ...")
    if len(words) <= room:
        return [f"  {words}"] if words else []
    begin = words[:room].rsplit(" ", 1)[0]
    rest = words[len(begin) :].strip()
    if len(rest) > room:
        rest = "... " + rest[-room:].split(" ", 1)[-1]
        begin += " ..."
    return [f"  {begin}", f"  {rest}"]


def report(shown: Shown) -> dict[str, Any]:
    """The plan as JSON data: its fields, and the figures derived from them."""
    plan = shown.plan
    spans = [
        {
            **dataclasses.asdict(span),
            "lines": [dataclasses.asdict(one) for one in shown.lines(span)],
            "text": shown.text(span),
        }
        for span in plan.spans
    ]
    return {
        **json.loads(plan.to_json()),
        "question": shown.question,
        "kept_tokens": plan.kept_tokens,
        "ratio": plan.ratio,
        "coverage": plan.coverage,
        "first_gap": plan.first_gap,
        "spans": spans,
    }
