"""`colossax train`."""

import argparse
import contextlib
import dataclasses
import errno
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from colossax.cli.machine.devices import choose_devices, request_host_devices
from colossax.cli.options.arguments import (
    BASE_HELP,
    Parser,
    keeping,
    number,
    plan_of_a_file,
    recipe_of_a_file,
    several_processes,
)
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.recipes import list_recipes, run_as_asked
from colossax.cli.options.values import described_values, shown
from colossax.cli.output import standard_output, tell
from colossax.config import Plan, bound_of, user_path
from colossax.errors import InputError
from colossax.processes import EXIT_CODES, heeded
from colossax.recipes import (
    DEFAULT_RECIPE,
    RECIPES,
    OwnTask,
    any_recipe,
    recipe,
    recipe_from_file,
)
from colossax.run import RunFolder
from colossax.tasks import TrainConfig, started_from, train_config_from_json

if TYPE_CHECKING:
    from colossax.processes import Group
    from colossax.run import RunConfig, Stream

DESCRIPTION = {
    "train": (
        "Train a model by a recipe, with any of its values overridden. Checkpoints,\n"
        "metrics.jsonl, TensorBoard events and loss.png go to --out; a killed run goes on with\n"
        "--resume."
    )
}

_CODES = (
    "\n\nexit codes: 0 done, 2 wrong input, 3 loss or gradients no longer finite, the last state\n"
    "not on disk, or the folder taken over, deleted or moved; saved and stopped: 129 by SIGHUP,\n"
    "130 by Ctrl-C, 143 by SIGTERM"
)

UNFINISHED = 3
"""Exit code of a run that ended without what it promises."""

_FIELDS = {
    "steps": ("N", "optimizer steps in all"),
    "seed": ("S", "of parameters and of the data's order"),
    "checkpoint_every": ("N", "steps between checkpoints; 0: at the end alone"),
    "validate_every": ("N", "steps between validations; 0: at the end alone"),
    "keep": ("N", "checkpoints kept"),
    "stop_after_skipped": ("N", "steps not finite in a row that end the run; 0: none do"),
    "clip_norm": ("X", "global norm gradients are scaled down to; none leaves them"),
    "z_loss": ("X", "coefficient of the squared log-partition"),
}
"""Fields of a `TrainConfig` that are options of their own; all others are dotted."""

_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
"""Where launchers tell a process its number."""


def add_arguments(parser: Parser, _verb: str) -> None:
    """Declare the options of `colossax train`."""
    names = ", ".join(RECIPES)
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help=f"one of {names}, or one of your own as package.module:function; default"
        f" {DEFAULT_RECIPE}",
    )
    recipe_of_a_file(parser)
    parser.add_argument("--out", metavar="DIR", help="the run's folder; default runs/RECIPE-NNN")
    parser.add_argument(
        "--resume",
        metavar="[=auto]",
        type=_resuming,
        default=False,
        help="go on with the run in --out; --resume=auto starts one where there is none",
    )
    parser.alone["--resume"] = "--resume=yes"
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="also go on with a run in --out that still goes on elsewhere, which then stops",
    )
    parser.add_argument(
        "--trackers",
        metavar="NAMES",
        type=lambda text: tuple(text.split(",")),
        help="where metrics go beside metrics.jsonl, divided by commas: tensorboard (default),"
        " wandb (offline unless WANDB_MODE says otherwise), trackio; json: nowhere",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a step on stdout")
    parser.add_argument(
        "--devices",
        metavar="N",
        type=number(1),
        help="devices of this process; on a CPU, N are made",
    )
    values = parser.add_argument_group("values of the recipe")
    for name, (kind, text) in _FIELDS.items():
        option = f"--{name.replace('_', '-')}"
        values.add_argument(option, dest=f"field_{name}", metavar=kind, help=text)
    values.add_argument(
        "--init",
        dest="field_init",
        metavar="CHECKPOINT",
        help="start from the parameters, with the model and the tokenizer, of a checkpoint",
    )
    values.add_argument("--base", metavar="CHECKPOINT", help=BASE_HELP)
    values.add_argument("--data", metavar="PATH", help="text, JSONL or Parquet, a file or a folder")
    plan_of_a_file(parser)
    keeping(parser)
    several_processes(parser)
    parser.prepare = functools.partial(_tell_values, parser)


def _resuming(text: str) -> bool | Literal["auto"]:
    if text not in ("yes", "auto"):
        raise argparse.ArgumentTypeError(f"found '{text}'; give --resume alone, or --resume=auto")
    return "auto" if text == "auto" else True


def _tell_values(parser: Parser, words: Sequence[str]) -> None:
    """Have the help list the values of the recipe that is named, or of the default one."""
    named = next((word for word in words if word in RECIPES), DEFAULT_RECIPE)
    config = recipe(named)
    for name, (_, text) in _FIELDS.items():
        value = shown(getattr(config, name))
        told = f"{text} ({bound_of(TrainConfig, name)}); default {value}"
        parser.option(f"--{name.replace('_', '-')}").help = told
    parser.epilog = described_values(config) + _CODES


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Train as asked and return the exit code."""
    # Orbax warns of every save that has to wait for the one before.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if args.list:
        return list_recipes(as_json=args.json)
    with _terminated_at_once():
        config = configure(args, overrides)
        _begin(config, args)
        # JAX and all that trains with it: what is wrong above is told without waiting for them.
        from colossax.cli.machine.programs import kept_programs
        from colossax.processes import find_launch, join, start_jax
        from colossax.run import RunOptions, train
        from colossax.tasks import task_of

        request_host_devices(args.devices)
        launch = find_launch(
            args.coordinator, args.processes, args.process_id, timeout_s=args.timeout_s
        )
        with (
            kept_programs(wanted=not args.no_cache),
            standard_output(protected=launch is not None) as out,
        ):
            group = join(launch, timeout_s=args.timeout_s)
            start_jax(launch)
            options = RunOptions(
                out=args.out,
                resume=args.resume,
                base=None if _starts_from_base(args) else args.base,
                take_over=args.take_over,
                trackers=args.trackers or RunOptions.trackers,
                devices=lambda: choose_devices(args.devices),
                emit=_emitter(out) if args.json and group.first else None,
            )
            if args.plan == "auto":
                config = _planned(config, args, overrides, group)
            if isinstance(config, OwnTask):
                assert config.config is not None
                task, how = config.task, config.config
            else:
                task, how = task_of(config, group), run_config(config)
            outcome = train(task, how, options, group)
    if outcome.failure is not None:
        return UNFINISHED
    return 0 if outcome.stopped_by is None else EXIT_CODES[outcome.stopped_by]


def _planned(
    config: TrainConfig | OwnTask,
    args: argparse.Namespace,
    overrides: list[Override],
    group: "Group",
) -> TrainConfig | OwnTask:
    """The run with the fastest plan for the devices that are there, found by the first process.

    Raises:
        InputError: There are no GPUs that plans are found for, or nothing fits.
    """
    from colossax.cli.options.found import plan_found, with_plan
    from colossax.offload import device_memory
    from colossax.planner.auto import target_here

    def find() -> str:
        devices = choose_devices(args.devices)
        memory = device_memory(devices, None)
        target, kind = target_here(devices), devices[0].device_kind
        given = {"memory": memory, "device_kind": kind, "fresh": args.no_cache}
        return plan_found(config, overrides, target, **given).to_json()

    return with_plan(config, Plan.from_json(group.from_first(find)))


def _begin(config: TrainConfig | OwnTask, args: argparse.Namespace) -> None:
    """Say what is done where JAX has yet to be loaded; of several processes the first says it."""
    ranks = (args.process_id, *(int(os.environ.get(name) or 0) for name in _RANKS))
    if isinstance(config, TrainConfig) and "jax" not in sys.modules and not any(ranks):
        tell(f"{config.recipe}: {config.steps} steps; starting JAX\n")


def configure(args: argparse.Namespace, overrides: list[Override]) -> TrainConfig | OwnTask:
    """The recipe, or the resumed run's own configuration when none is named, overridden.

    Raises:
        InputError: Unknown names, or values that do not fit.
    """
    folder = None if args.out is None else RunFolder(path=user_path(args.out, "--out"))
    resumed = _goes_on(args)
    written = folder.config() if folder is not None and resumed else None
    before = None
    if folder is not None and written and "model" in written:
        before = _as_it_was(folder, written)
    plain = [(name, getattr(args, f"field_{name}")) for name in ("init", *_FIELDS)]
    given = [(name, text) for name, text in plain if text is not None]
    if _starts_from_base(args):
        if before is not None and not (before.adapter or before.drafter):
            raise InputError(f"--base: the run in {args.out} has no adapter; leave the option out")
        given.append(("init", args.base))
    if args.data is not None:
        given.append(("data.path", args.data))
    if args.plan not in (None, "auto"):
        given.append(("plan", args.plan))
    given += overrides
    config = _asked(args, before, has_task=written is not None)
    if isinstance(config, OwnTask):
        if config.config is None and "steps" not in dict(given):
            raise InputError(
                f"recipe {config.name}: gives a task and not how many steps it trains; add --steps"
                " N, or return (Task, RunConfig(steps=...))"
            )
        return run_as_asked(config, given)
    config = apply_overrides(config, given)
    return config if before is None else _keep_schedule(config, before)


def _goes_on(args: argparse.Namespace) -> bool:
    """Whether there is a run in `--out`, and `--resume`."""
    return (
        args.out is not None
        and bool(args.resume)
        and RunFolder(path=user_path(args.out, "--out")).holds_run
    )


def _starts_from_base(args: argparse.Namespace) -> bool:
    """Whether `--base` stands for what a run started from, of which it needs nothing else now."""
    return args.base is not None and args.field_init is None and _goes_on(args)


def _as_it_was(folder: RunFolder, written: dict[str, Any]) -> TrainConfig:
    """The configuration that a run was begun with."""
    try:
        return train_config_from_json(written)
    except InputError as problem:
        raise InputError(f"{folder.path}/run.json: {problem}") from problem


def _asked(
    args: argparse.Namespace, before: TrainConfig | None, *, has_task: bool
) -> TrainConfig | OwnTask:
    """What is named, or what a resumed run was, or the default."""
    if args.recipe is not None and args.config is not None:
        raise InputError(
            f"--config {args.config}: is a recipe, and so is {args.recipe}; give one of the two"
        )
    if args.config is not None:
        return recipe_from_file(args.config)
    if args.recipe is not None:
        return any_recipe(args.recipe)
    if before is None and has_task:
        raise InputError(
            f"--resume: {args.out} holds a run of a task of your own; name it again, as in"
            " colossax train my_package.recipes:mine --resume"
        )
    return recipe(DEFAULT_RECIPE) if before is None else before


def _keep_schedule(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """With the learning-rate schedule's length of the run that is resumed, unless one is asked."""
    if config.optimizer.schedule_steps is not None:
        return config
    length = before.schedule_steps
    return config.replace(optimizer=dataclasses.replace(config.optimizer, schedule_steps=length))


def run_config(config: TrainConfig) -> "RunConfig":
    """What of a configuration says how its task is run."""
    from colossax.run import RunConfig

    names = {field.name for field in dataclasses.fields(RunConfig)} - {"init"}
    given = {name: getattr(config, name) for name in names}
    return RunConfig(**given, init=started_from(config))


def _emitter(out: "Stream") -> Callable[[dict[str, Any]], None]:
    def emit(record: dict[str, Any]) -> None:
        try:
            out.write(f"{json.dumps(record)}\n")
            out.flush()
        except ValueError as problem:  # of a stream that was closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from problem

    return emit


@contextlib.contextmanager
def _terminated_at_once() -> Iterator[None]:
    """Until there is something to save, SIGTERM and SIGHUP end the process with their codes."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_CODES[signal.Signals(number).name])

    numbers = [number for number in heeded() if number != signal.SIGINT]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
