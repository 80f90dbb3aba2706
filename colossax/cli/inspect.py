"""`colossax inspect`."""

import argparse
import dataclasses
import itertools
import json

import jax

from colossax.aot import Target, parse_target
from colossax.cli.options.compiling import preset_overrides
from colossax.cli.options.found import plan_found, with_plan
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.recipes import run_as_asked
from colossax.cli.options.written import file_to_write, writing
from colossax.cli.output import put, tell
from colossax.config import Plan
from colossax.errors import InputError
from colossax.planner import (
    Inspection,
    compare_layouts,
    inspect_task,
    largest_microbatch,
    settle_task_for_target,
)
from colossax.planner.auto import AUTO
from colossax.planner.telling import describe, describe_layouts, describe_many
from colossax.recipes import OwnTask, any_recipe, recipe_from_file
from colossax.tasks import Task, TrainConfig, task_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """One combination of target and preset.

    Attributes:
        label: For people.
        run: As it is on that target; of a recipe of one's own that gives a task, the task.
    """

    label: str
    target: Target
    run: TrainConfig | OwnTask

    @property
    def parts(self) -> tuple[Task, Plan]:
        """What is compiled."""
        if isinstance(self.run, TrainConfig):
            return task_of(self.run), self.run.plan
        assert self.run.config is not None
        return self.run.task, self.run.config.plan


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Inspect as asked and return the exit code."""
    # What is compiled for is not what is here: a GPU on this machine must not be claimed.
    jax.config.update("jax_platforms", "cpu")
    if args.plan not in (None, AUTO):
        overrides = [("plan", args.plan), *overrides]
    if args.compare_layouts is not None:
        return _compare_layouts(args, overrides)
    hlo, plot = file_to_write(args.hlo, "--hlo"), file_to_write(args.plot, "--plot")
    inspected = {
        asked.label: _inspected(asked, largest=args.largest_microbatch)
        for asked in _asked(args, overrides)
    }
    with writing(hlo, plot):
        if hlo:
            hlo.write_text("\n".join(i.program.hlo for i in inspected.values()), "utf-8")
        if plot:
            from colossax.planner.counting.inspection_plot import plot_inspections

            plot_inspections(inspected, plot)
    if args.json:
        for one in inspected.values():
            put(json.dumps(one.to_json()) + "\n")
    elif len(inspected) == 1:
        put(describe(next(iter(inspected.values()))))
    else:
        put(describe_many(inspected))
    return 0


def _inspected(asked: _Asked, *, largest: bool) -> Inspection:
    task, plan = asked.parts
    _tell(f"compiling {asked.label}")
    settled = settle_task_for_target(task, plan, asked.target)
    if settled.fitted is not None:
        _tell(settled.fitted.line)
    if "pipeline.cuts" in settled.reasons:
        _tell(settled.reasons["pipeline.cuts"])
    one = inspect_task(task, settled.plan, asked.target)
    if not largest:
        return one
    largest_found = largest_microbatch(
        task, settled.plan, asked.target, lambda line: _tell(f"  {line}")
    )
    return one.with_largest(largest_found)


def _recipe(args: argparse.Namespace) -> TrainConfig | OwnTask:
    """The recipe that is named, or in a file.

    Raises:
        InputError: There is none.
    """
    if (args.recipe is None) == (args.config is None):
        raise InputError("inspect: name one recipe, or give --config FILE; see --list")
    return any_recipe(args.recipe) if args.config is None else recipe_from_file(args.config)


def _asked(args: argparse.Namespace, overrides: list[Override]) -> list[_Asked]:
    """Each combination of targets and presets.

    Raises:
        InputError: A name or value does not fit, or a task is given and no target.
    """
    given = _recipe(args)
    targets = args.target or (given.target if isinstance(given, TrainConfig) else None)
    if targets is None:
        raise InputError(
            f"inspect: {args.recipe} gives a task, which names no GPUs to compile for; add"
            " --target, such as --target h100:1x8"
        )
    return [
        _Asked(
            label=" ".join(filter(None, (target.name, dict(changes).get("plan.preset")))),
            target=target,
            run=_changed(given, changes, target if args.plan == AUTO else None),
        )
        for target, changes in itertools.product(
            [
                parse_target(one, network=args.network, between=args.between)
                for one in targets.split(",")
            ],
            preset_overrides(overrides),
        )
    ]


def _changed(
    given: TrainConfig | OwnTask, changes: list[Override], target: Target | None
) -> TrainConfig | OwnTask:
    """The run with its values; with a target, and with the fastest plan found for that."""
    own = isinstance(given, OwnTask)
    run = run_as_asked(given, changes) if own else apply_overrides(given, changes)
    return run if target is None else with_plan(run, plan_found(run, changes, target))


def _compare_layouts(args: argparse.Namespace, overrides: list[Override]) -> int:
    if args.plan == AUTO:
        raise InputError("--compare-layouts and --plan auto: each looks for a plan; leave one out")
    if args.compare_layouts < 0:
        raise InputError(
            f"--compare-layouts: found {args.compare_layouts}; give how many to compile, or nothing"
        )
    for asked in _asked(args, overrides):
        config, target = asked.run, asked.target
        if not isinstance(config, TrainConfig):
            raise InputError(
                f"--compare-layouts: {config.name} gives a task, and layouts are compared by the"
                " layers of the library's own models; leave it out, or compare plans, as in"
                " --plan.preset zero3,zero1"
            )
        layouts = compare_layouts(config, target, compiled=args.compare_layouts or None, tell=_tell)
        if args.json:
            for one in layouts:
                facts = {"recipe": config.recipe, "target": target.name, **one.to_json()}
                put(json.dumps(facts) + "\n")
        else:
            put(describe_layouts(config.recipe, target.name, layouts))
    return 0


def _tell(line: str) -> None:
    tell(f"{line}\n")
