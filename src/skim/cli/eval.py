"""`skim eval`: measure the quality of answers in several modes on the same prompts."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from skim.cli.bench.common import (
    PREFILL_NOTE,
    Files,
    add_engine,
    add_modes,
    add_numbers,
    add_output,
    engine_of,
    finish,
)
from skim.cli.documents import read_text
from skim.cli.local import opened
from skim.cli.settings.parser import Parser
from skim.config import EngineConfig
from skim.errors import ConfigError
from skim.evals.run import Cell, parse_modes
from skim.evals.run import run as run_task
from skim.evals.task import Evaluation, Task
from skim.evals.tasks import TASKS
from skim.evals.tasks.agree import TOKENS, Agree
from skim.measure.book import packaged_text
from skim.measure.grid import as_text
from skim.measure.report import Row, table
from skim.progress import Tenths

if TYPE_CHECKING:
    from skim.llm import LLM

HELP = "measure the quality of answers, dense and sparse side by side"
USAGE = "TASK [MODEL] [options]"
MODES = ("dense", "blend:0.1")
CONTEXTS = (4096,)
N = 20
COLUMNS = (
    "Other columns: read, the share of the prompt that was read; ttft, the time to first token; and, if "
    "answers have a place in the text, kept, the share of these places that were read completely. With "
    "several kinds or contexts, a second table shows the share kept by kind and context."
)
SHARED = (
    "Modes that read a prompt alike computed it once (--share-prompts): times to first token and numbers of "
    "computed tokens are left out."
)


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: the same prompts in every mode, greedy replies, 95% intervals. "
        "A row fails, and with it the command, if a reply is empty, the engine has an error, a prompt is "
        "not read as its mode says, or a number is not finite."
    )
    parser.epilog = "`skim eval TASK --help` lists a task's options. For speed: skim bench."
    tasks = parser.add_subparsers(
        dest="task", metavar="TASK", required=True, prog="skim eval", parser_class=Parser
    )
    for name, task in TASKS.items():
        one = tasks.add_parser(name, help=task.help, usage=f"skim eval {name} [MODEL] [options]")
        one.description = f"{task.help[0].upper()}{task.help[1:]}. {inspect.getdoc(task)} {COLUMNS}"
        one.set_defaults(parser=one)
        _add_task_options(one, task)
        _add_common_options(one, task)


def _add_task_options(parser: Parser, task: type[Evaluation]) -> None:
    if len(task.kinds) > 1:
        parser.add_argument(
            "--kinds",
            nargs="+",
            choices=task.kinds,
            default=list(task.default_kinds),
            metavar="KIND",
            help=f"{task.kinds_help}; rows for each (default: {' '.join(task.default_kinds)})",
        )
    if task.deep_kinds:
        parser.add_argument(
            "--depths",
            nargs="+",
            type=float,
            metavar="X",
            help="place of the answer in the document, from 0 (its beginning) to 1 (its end); rows for "
            f"each (for {', '.join(task.deep_kinds)}; default: anywhere)",
        )
    if task is Agree:
        parser.add_argument(
            "--tokens",
            type=int,
            default=TOKENS,
            metavar="N",
            help="compare modes over the last N tokens of each text (default: %(default)s)",
        )
    if task.source == "text":
        parser.add_argument(
            "--text", metavar="FILE", help="natural text in UTF-8 for the documents (default: a novel)"
        )
    elif task.source == "data":
        parser.add_argument(
            "--data", metavar="FILE", required=True, help="questions with documents, in HotpotQA's JSON"
        )


def _add_common_options(parser: Parser, task: type[Evaluation]) -> None:
    add_numbers(
        parser,
        "--contexts",
        CONTEXTS,
        "tokens of prompt and reply together; beyond the model's context window leave `dense` out of --modes "
        "and keep fewer tokens than the window holds",
    )
    add_modes(parser, MODES)
    parser.add_argument(
        "--no-controls",
        dest="controls",
        action="store_false",
        help="leave out the two control rows of every sparse mode but `auto`: `lexical` (words alone) and "
        "`random` (chance), with the same budget",
    )
    parser.add_argument(
        "-n", "--n", type=int, default=N, metavar="N", help="samples for each row (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="random seed of the samples (default: 0)"
    )
    if issubclass(task, Task):
        parser.add_argument(
            "--concurrency",
            type=int,
            default=1,
            metavar="N",
            help="ask for N replies at a time: faster on a GPU, but times to first token are then those of a "
            "busy engine (default: %(default)s)",
        )
        parser.add_argument(
            "--share-prompts",
            action="store_true",
            help="compute a prompt once for all modes that read it alike, such as `dense` and `slow-fast`: "
            "faster, but without times to first token and numbers of computed tokens",
        )
    if issubclass(task, Task) and task.has_evidence:
        parser.add_argument(
            "--kept-only",
            action="store_true",
            help="plan the prompts and generate no replies, to measure in less time how much of the evidence "
            "is kept; modes that read everything are left out",
        )
    add_output(parser, "the report, with every reply,")
    add_engine(parser, PREFILL_NOTE)


def run(args: argparse.Namespace) -> int:
    config = engine_of(args)
    modes = parse_modes(args.modes, controls=args.controls, drafter=config.prefill.drafter)
    kept_only = getattr(args, "kept_only", False)
    if kept_only:
        modes = [mode for mode in modes if mode.prefill.sparse_prefill != "off"]
        if not modes:
            raise ConfigError(f"--kept-only has nothing to plan: {' '.join(args.modes)} reads everything")
    task = TASKS[args.task]
    cells = cells_of(args, task)
    inputs = [name for name in (getattr(args, "text", None), getattr(args, "data", None)) if name]
    files = Files.of(args, inputs)
    shared = getattr(args, "share_prompts", False) and not kept_only and len(modes) > 1
    made = task(read_text(inputs[0]) if inputs else packaged_text() if task.source == "text" else "")

    def work(llm: LLM, progress: Callable[[int, int], None]) -> list[Row]:
        common: dict[str, Any] = {"n": args.n, "seed": args.seed, "progress": progress}
        if isinstance(made, Agree):
            return made.run(llm, cells, modes, tokens=args.tokens, **common)
        assert isinstance(made, Task)
        common |= {"concurrency": args.concurrency, "share_prompts": shared}
        return run_task(llm, made, cells, modes, kept_only=kept_only, **common)

    settings, rows = evaluate(args, config, work)
    if issubclass(task, Task):
        settings |= {"concurrency": args.concurrency, "share_prompts": shared}
    show = partial(listing, shared=shared)
    return finish(f"eval {args.task}", args, files, settings, rows, len(cells) * len(modes), show)


def listing(rows: Sequence[Row], *, shared: bool) -> str:
    """The rows as a table; below it, the evidence kept by kind and context if there are several.

    `shared` is True if modes shared prompts: a line says so.
    """
    return "\n\n".join(text for text in (table(rows), SHARED if shared else "", as_text(rows)) if text)


def evaluate(
    args: argparse.Namespace,
    config: EngineConfig,
    work: Callable[[LLM, Callable[[int, int], None]], list[Row]],
) -> tuple[dict[str, Any], list[Row]]:
    """Open the model and run the work. Returns the settings common to all rows, and the rows."""
    with opened(config) as llm:
        rows = work(llm, Tenths(f"eval {args.task}", "samples"))
        settings: dict[str, Any] = {
            "models": {config.model.model: {"window": llm.engine.core.max_model_len}},
            "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
            "device": str(llm.engine.model.device),
            "n": args.n,
            "seed": args.seed,
        }
    return settings, rows


def cells_of(args: argparse.Namespace, task: type[Evaluation]) -> list[Cell]:
    """Every kind at every context and depth. Raises for settings that cannot be run."""
    if args.n < 1:
        raise ConfigError(f"--n must be at least 1, got {args.n}")
    if getattr(args, "concurrency", 1) < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
    if min(args.contexts) < 1:
        raise ConfigError(f"--contexts must be tokens, at least 1, got {min(args.contexts)}")
    if getattr(args, "tokens", 1) < 1:
        raise ConfigError(f"--tokens must be at least 1, got {args.tokens}")
    kinds: Sequence[str] = getattr(args, "kinds", task.default_kinds)
    depths: Sequence[float | None] = getattr(args, "depths", None) or [None]
    for depth in depths:
        if depth is not None and not 0 <= depth <= 1:
            raise ConfigError(f"--depths must be from 0 to 1, got {depth:g}")
        shallow = [kind for kind in kinds if kind not in task.deep_kinds]
        if depth is not None and shallow:
            raise ConfigError(f"--depths has no meaning for {shallow[0]}, whose answers may be anywhere")
    return [
        Cell(kind, context, depth)
        for kind in dict.fromkeys(kinds)
        for context in dict.fromkeys(args.contexts)
        for depth in dict.fromkeys(depths)
    ]
