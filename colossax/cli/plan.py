"""`colossax plan`."""

import argparse
import json

import jax

from colossax.aot import parse_target
from colossax.cli.output import put, tell
from colossax.cli.overrides import Override, apply_overrides
from colossax.cli.recipes import run_as_asked
from colossax.config import MESH_AXES, nearest, user_path
from colossax.errors import InputError
from colossax.planner.searching import AXES, Answer, Asked, Subject, plan_run
from colossax.planner.telling import describe_plans
from colossax.recipes import any_recipe, recipe_from_file
from colossax.tasks import TrainConfig

_SEARCHED = tuple(axis.value for axis in AXES)


def run(_verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Plan as asked and return the exit code."""
    # What is planned for is not what is here: a GPU on this machine must not be claimed.
    jax.config.update("jax_platforms", "cpu")
    subject, plan, target_name, name = _subject(args, overrides)
    target = parse_target(target_name, network=args.network, between=args.between)
    answer = plan_run(
        subject,
        plan,
        target,
        asked=asked_of(args.pin, args.forbid),
        top=args.top,
        verify=not args.no_compile,
        device_gb=args.device_gb,
        tell=lambda line: tell(f"{line}\n"),
    )
    if args.json:
        facts = {"recipe": name, "target": target.name, "scored": answer.scored}
        put(json.dumps({**facts, "plans": [one.to_json() for one in answer.plans]}) + "\n")
    else:
        put(describe_plans(f"{name} on {target.name}", answer, args.out))
    _write(args, answer)
    return 0


def _subject(args: argparse.Namespace, overrides: list[Override]):
    """What is planned, its plan, the target's name and its own.

    Raises:
        InputError: There is no such recipe, or no target.
    """
    if (args.recipe is None) == (args.config is None):
        raise InputError("plan: name one recipe, or give --config FILE; see --list")
    given = any_recipe(args.recipe) if args.config is None else recipe_from_file(args.config)
    if isinstance(given, TrainConfig):
        config = apply_overrides(given, overrides)
        return Subject.of(config), config.plan, args.target or config.target, config.recipe
    own = run_as_asked(given, overrides)
    if args.target is None:
        raise InputError(
            f"plan: {own.name} gives a task, which names no GPUs to plan for; add --target, such as"
            " --target h100:1x8"
        )
    assert own.config is not None
    return Subject(task=own.task), own.config.plan, args.target, own.name


def asked_of(pins: list[str], forbidden: list[str]) -> Asked:
    """What `--pin` and `--forbid` ask for.

    Raises:
        InputError: They name no axis that is searched, or contradict one another.
    """
    sizes: dict[str, int] = {}
    dims: dict[str, tuple[str, ...]] = {}
    for text in pins:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--pin: found '{text}'; write it NAME=VALUE, as tensor=4")
        if name in sizes or name in dims:
            raise InputError(f"--pin {name}: is given twice; give it once")
        if name in MESH_AXES or value.isdecimal():
            _check_axis(name, "--pin")
            if not value.isdecimal() or int(value) < 1:
                raise InputError(f"--pin {name}: found '{value}'; give its size, 1 or more")
            sizes[name] = int(value)
        else:
            axes = tuple(value.split("+"))
            for axis in axes:
                _check_axis(axis, f"--pin {name}")
            dims[name] = axes
    for axis in forbidden:
        _check_axis(axis, "--forbid")
        if sizes.get(axis, 1) > 1:
            raise InputError(
                f"--pin {axis}={sizes[axis]} and --forbid {axis} contradict; leave one of them out"
            )
        for dim, axes in dims.items():
            if axis in axes:
                raise InputError(
                    f"--pin {dim}={'+'.join(axes)} and --forbid {axis} contradict; leave one of"
                    " them out"
                )
    return Asked(sizes=sizes, forbidden=frozenset(forbidden), dims=dims)


def _check_axis(axis: str, where: str) -> None:
    if axis not in _SEARCHED:
        raise InputError(
            f"{where}: '{axis}' is no mesh axis that is searched{nearest(axis, _SEARCHED)}; these"
            f" are {', '.join(_SEARCHED)}"
        )


def _write(args: argparse.Namespace, answer: Answer) -> None:
    """The files asked for.

    Raises:
        InputError: They cannot be written.
    """
    try:
        if args.out:
            text = answer.plans[0].plan.to_json() + "\n"
            user_path(args.out, "--out").write_text(text, "utf-8")
        if args.plot:
            from colossax.planner.telling.plan_plot import plot_plans

            plot_plans(answer, user_path(args.plot, "--plot"))
    except OSError as problem:
        name = problem.filename or args.out or args.plot
        raise InputError(
            f"'{name}' cannot be written: {problem.strerror}; choose another"
        ) from None
