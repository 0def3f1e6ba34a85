"""`skim eval`: how good answers are, in every mode on the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skim.cli.ask import read_text
from skim.cli.bench_common import Files, add_engine, add_output, engine_of, finish
from skim.cli.calibrate import counted
from skim.cli.local import opened
from skim.cli.parser import Parser
from skim.config import EngineConfig
from skim.errors import ConfigError
from skim.evals.run import Cell, parse_modes
from skim.evals.run import run as run_task
from skim.evals.task import Evaluation, Task
from skim.evals.tasks import TASKS
from skim.evals.tasks.agree import TOKENS, Agree
from skim.measure.book import packaged_text
from skim.measure.modes import SYNTAX
from skim.measure.report import Row

if TYPE_CHECKING:
    from skim.llm import LLM

HELP = "measure the quality of answers, dense and sparse side by side"
USAGE = "TASK [MODEL] [options]"
MODES = ("dense", "cascade:0.1")
CONTEXTS = (4096,)
N = 20


def configure(parser: Parser) -> None:
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}: the same prompts in every mode, greedy replies, 95% intervals. "
        "A row fails, and with it the command, where a reply is empty, the engine has an error, a prompt is "
        "not read as its mode says, or a number is not finite."
    )
    tasks = parser.add_subparsers(
        dest="task", metavar="TASK", required=True, prog="skim eval", parser_class=Parser
    )
    for name, task in TASKS.items():
        one = tasks.add_parser(name, help=task.help, usage=f"skim eval {name} [MODEL] [options]")
        one.description = f"{task.help[0].upper()}{task.help[1:]}."
        one.set_defaults(parser=one)
        _add_task_options(one, task)
        _add_common_options(one)


def _add_task_options(parser: Parser, task: type[Evaluation]) -> None:
    if len(task.kinds) > 1:
        parser.add_argument(
            "--kinds",
            nargs="+",
            choices=task.kinds,
            default=list(task.default_kinds),
            metavar="KIND",
            help=f"of {', '.join(task.kinds)} (default: {' '.join(task.default_kinds)})",
        )
    if task.deep_kinds:
        parser.add_argument(
            "--depths",
            nargs="+",
            type=float,
            metavar="X",
            help="where in the document the answer stands, from 0 to 1, a row each (default: anywhere)",
        )
    if task is Agree:
        parser.add_argument(
            "--tokens",
            type=int,
            default=TOKENS,
            metavar="N",
            help="of the text that modes are compared over, the last ones (default: %(default)s)",
        )
    if task.source == "text":
        parser.add_argument(
            "--text", metavar="FILE", help="natural text in UTF-8 for the documents (default: a novel)"
        )
    elif task.source == "data":
        parser.add_argument(
            "--data", metavar="FILE", required=True, help="questions with documents, JSON as HotpotQA has it"
        )


def _add_common_options(parser: Parser) -> None:
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        default=list(CONTEXTS),
        metavar="N",
        help="tokens of prompt and reply together. Beyond the model's window leave `dense` out of the modes, "
        f"which is refused there (default: {' '.join(map(str, CONTEXTS))})",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        metavar="MODE",
        help=f"{SYNTAX} (default: {' '.join(MODES)})",
    )
    parser.add_argument(
        "--no-controls",
        dest="controls",
        action="store_false",
        help="leave out the rows of words alone and of chance that every sparse mode but `auto` brings along",
    )
    parser.add_argument(
        "-n", "--n", type=int, default=N, metavar="N", help="samples for each row (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="other samples for another number (default: 0)"
    )
    add_output(parser, "the report, with every reply,")
    add_engine(parser, "How prompts are read is told by the modes.")


def run(args: argparse.Namespace) -> int:
    config = engine_of(args)
    modes = parse_modes(args.modes, controls=args.controls, drafter=config.prefill.drafter)
    task = TASKS[args.task]
    cells = cells_of(args, task)
    inputs = [name for name in (getattr(args, "text", None), getattr(args, "data", None)) if name]
    files = Files.of(args, inputs)
    made = task(read_text(inputs[0]) if inputs else packaged_text() if task.source == "text" else "")

    def work(llm: LLM, progress: Callable[[int, int], None]) -> list[Row]:
        common: dict[str, Any] = {"n": args.n, "seed": args.seed, "progress": progress}
        if isinstance(made, Agree):
            return made.run(llm, cells, modes, tokens=args.tokens, **common)
        assert isinstance(made, Task)
        return run_task(llm, made, cells, modes, **common)

    settings, rows = evaluate(args, config, work)
    return finish(f"eval {args.task}", args, files, settings, rows, len(cells) * len(modes))[1]


def evaluate(
    args: argparse.Namespace,
    config: EngineConfig,
    work: Callable[[LLM, Callable[[int, int], None]], list[Row]],
) -> tuple[dict[str, Any], list[Row]]:
    """Open the model and do the work with signs of life; what all rows have in common, and the rows."""
    with opened(config) as llm:
        with counted(f"eval {args.task}") as progress:
            rows = work(llm, progress)
        settings: dict[str, Any] = {
            "model": config.model.model,
            "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
            "device": str(llm.engine.model.device),
            "n": args.n,
            "seed": args.seed,
        }
    return settings, rows


def cells_of(args: argparse.Namespace, task: type[Evaluation]) -> list[Cell]:
    """Every kind at every context and depth; what cannot be run is told before anything is."""
    if args.n < 1:
        raise ConfigError(f"--n must be at least 1, got {args.n}")
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
            raise ConfigError(f"--depths has no meaning for {shallow[0]}, whose answers stand anywhere")
    return [
        Cell(kind, context, depth)
        for kind in dict.fromkeys(kinds)
        for context in dict.fromkeys(args.contexts)
        for depth in dict.fromkeys(depths)
    ]
