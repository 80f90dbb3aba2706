"""`colossax plan`."""

import argparse
import contextlib
import json

import jax

from colossax.aot import kernels_anew, parse_target
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.recipes import run_as_asked
from colossax.cli.options.written import file_to_write, writing
from colossax.cli.output import put, tell
from colossax.cli.serving.plans import check_serving, run_serving
from colossax.errors import InputError
from colossax.planner.searching import Subject, asked_of, calibrated_by, plan_run
from colossax.planner.telling import describe_plans
from colossax.recipes import OwnTask, any_recipe, recipe_from_file
from colossax.tasks import TrainConfig

_SEARCHED = (
    "plan.mesh",
    "plan.preset",
    "plan.rules",
    "plan.batch",
    "plan.segments",
    "plan.pipeline",
)
"""Settings that a search finds, whatever is given."""


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Plan as asked and return the exit code."""
    # What is planned for is not what is here: a GPU on this machine must not be claimed.
    jax.config.update("jax_platforms", "cpu")
    check_serving(args)
    out, plot = file_to_write(args.out, "--out"), file_to_write(args.plot, "--plot")
    if args.serve:
        with kernels_anew() if args.no_cache else contextlib.nullcontext():
            return run_serving(args, overrides, _given(args), out)
    asked = asked_of(args.pin, args.forbid, args.allow)
    if args.target is not None:  # before a task is built
        parse_target(args.target, network=args.network, between=args.between)
    subject, plan, target_name, name = _subject(args, overrides)
    target = parse_target(target_name, network=args.network, between=args.between)
    for given in sorted({each for each, _ in overrides if each.startswith(_SEARCHED)}):
        tell(f"--{given}: is what is searched, and does not hold; --pin says what has to\n")
    answer = plan_run(
        subject,
        plan,
        target,
        asked=asked,
        top=args.top,
        verify=not args.no_compile,
        device_gb=args.device_gb,
        host_gb=args.host_gb,
        disk_gb=args.disk_gb,
        rates=calibrated_by(args.rates, target, plan),
        tell=lambda line: tell(f"{line}\n"),
    )
    with writing(out, plot):
        if out:
            out.write_text(answer.plans[0].plan.to_json() + "\n", "utf-8")
        if plot:
            from colossax.planner.telling.plan_plot import plot_plans

            plot_plans(answer, plot)
    if args.json:
        facts = {"recipe": name, "target": target.name, "scored": answer.scored}
        facts |= {"rates": answer.rates} if answer.rates else {}
        put(json.dumps({**facts, "plans": [one.to_json() for one in answer.plans]}) + "\n")
    else:
        put(describe_plans(f"{name} on {target.name}", answer, args.out))
    return 0


def _given(args: argparse.Namespace) -> TrainConfig | OwnTask:
    """What the recipe gives.

    Raises:
        InputError: There is no such recipe.
    """
    if (args.recipe is None) == (args.config is None):
        raise InputError("plan: name one recipe, or give --config FILE; see --list")
    return any_recipe(args.recipe) if args.config is None else recipe_from_file(args.config)


def _subject(args: argparse.Namespace, overrides: list[Override]):
    """What is planned, its plan, the target's name and its own.

    Raises:
        InputError: There is no such recipe, or no target.
    """
    given = _given(args)
    if isinstance(given, TrainConfig):
        config = apply_overrides(given, overrides)
        return (
            Subject.of(config, fresh=args.no_cache),
            config.plan,
            args.target or config.target,
            config.recipe,
        )
    own = run_as_asked(given, overrides)
    if args.target is None:
        raise InputError(
            f"plan: {own.name} gives a task, which names no GPUs to plan for; add --target, such as"
            " --target h100:1x8"
        )
    assert own.config is not None
    return Subject(task=own.task, fresh=args.no_cache), own.config.plan, args.target, own.name
