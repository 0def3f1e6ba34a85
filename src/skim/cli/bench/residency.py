"""`skim bench ttft --residency`: the policies for target and drafter on one card, and no sparse prefill."""

from __future__ import annotations

import argparse
from dataclasses import replace

from skim.cli.bench.common import Files, finish, modes_of, tell
from skim.cli.bench.models import Choice, Subject, choices_of, expected_rows, measure_models
from skim.cli.settings.parser import Parser
from skim.config import EngineConfig
from skim.errors import ConfigError
from skim.measure.modes import Mode
from skim.measure.report import Row

POLICIES = ("swap", "keep-target", "both")


def add_policies(parser: Parser) -> None:
    parser.add_argument(
        "--residency",
        dest="policies",
        nargs="*",
        choices=POLICIES,
        metavar="POLICY",
        help="compare policies for target and drafter instead: a row without sparse prefill (with "
        "`--offload-layers auto` if the model does not fit beside its keys and values), then one for each "
        f"policy, all of {', '.join(POLICIES)} by default, with the sparse mode of --modes. Each row has its "
        "own engine; speed is relative to the first. Needs a drafter; use --memory-cap for a smaller GPU",
    )


def compare_policies(args: argparse.Namespace) -> int:
    for flag, given in (("--warm", args.warm), ("--peer", args.peer)):
        if given:
            raise ConfigError(f"{flag} cannot be combined with --residency; leave one of them out")
    choices = [_loading_by_layers(choice) for choice in choices_of(args)]
    if args.drafter_shape is None and choices[0].config.prefill.drafter is None:
        raise ConfigError("--residency compares policies for a drafter; set --drafter or --drafter-shape")
    mode = _sparse_mode(args, choices[0].config)
    files = Files.of(args)
    contexts = sorted(set(args.contexts))
    policies = [policy for policy in POLICIES if not args.policies or policy in args.policies]

    def measure(subject: Subject) -> list[Row]:
        from skim.bench.residency import Models, Task, measure_residency

        assert subject.drafter is not None
        models = Models(subject.model, subject.drafter)
        task = Task(contexts, mode, args.repeats, policies)
        return measure_residency(models, subject.config, task, subject.prompts, tell)

    settings, rows = measure_models(args, choices, measure)

    from skim.bench.residency import listing

    settings["memory_cap"] = choices[0].config.model.cap_bytes
    expected = expected_rows(settings, len(contexts) * (1 + len(policies)))
    return finish("bench ttft", args, files, settings, rows, expected, listing)


def _loading_by_layers(choice: Choice) -> Choice:
    """The choice with settings that load a GPU's model layer by layer: it may be larger than the cap."""
    from skim.models.load import pick_device

    model = choice.config.model
    if model.offload_layers != 0:
        raise ConfigError("--residency decides about offload_layers itself; leave it out")
    if pick_device(model.device).type != "cuda":
        return choice
    return replace(choice, config=replace(choice.config, model=replace(model, offload_layers="auto")))


def _sparse_mode(args: argparse.Namespace, config: EngineConfig) -> Mode:
    """The one mode that skims."""
    sparse = [mode for mode in modes_of(args, config) if not mode.is_dense]
    if len(sparse) != 1 or sparse[0].prefill.sparse_prefill == "off":
        named = " ".join(mode.name for mode in sparse) or "none"
        raise ConfigError(
            f"--residency needs one mode that skims, such as blend:0.1, in --modes; got {named}"
        )
    return sparse[0]
