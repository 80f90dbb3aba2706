"""`colossax plan --serve`, and `--plan` of what continues texts."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossax.cli.options.arguments import number, real
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.written import writing
from colossax.cli.output import put, tell
from colossax.config import Plan, above
from colossax.errors import InputError
from colossax.tasks import TrainConfig

_OPTIONS = {"context": None, "seats": None, "latency_ms": None, "weights": "own", "cache": "own"}
"""Of `--serve` alone, and what they are where nobody gives them."""

_UNCOUNTED = (
    "draft",
    "keeps",
    "keep",
    "window_rings",
    "adapter",
    "host_pages",
    "outliers",
    "pool",
    "pages",
)
"""Options of `generate` and `serve` that change what an engine needs in ways no formula knows."""


def serving_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `colossax plan --serve` is told."""
    group = parser.add_argument_group("plans for serving")
    group.add_argument(
        "--serve",
        action="store_true",
        help="plans for colossax serve: meshes and requests at once that give most tokens a second"
        " where every request is as long as it may be; --out writes the first for its --plan",
    )
    asked = {
        "--context": ("N", number(2), "most tokens of a request; default what the model can"),
        "--seats": ("N", number(1), "requests at once, in all; default as many as give most"),
        "--latency-ms": ("X", real(above(0)), "most from one token of a request to its next"),
        "--weights": ("FORM", str, "matrices in codes, as of colossax serve; default own"),
        "--cache": ("FORM", str, "keys and values in int8 or fp8; default own"),
    }
    for name, (metavar, kind, told) in asked.items():
        default = _OPTIONS[name[2:].replace("-", "_")]
        group.add_argument(name, metavar=metavar, type=kind, default=default, help=told)


def check_serving(args: argparse.Namespace) -> None:
    """Refuse options of plans for serving beside a plan for training, and the other way round.

    Raises:
        InputError: There are any.
    """
    given = [name for name, default in _OPTIONS.items() if getattr(args, name) != default]
    if given and not args.serve:
        raise InputError(f"--{given[0].replace('_', '-')}: is of plans for serving; add --serve")
    for name in ("plot", "host_gb", "disk_gb", "rates", "allow") if args.serve else ():
        if getattr(args, name):
            raise InputError(
                f"--{name.replace('_', '-')}: is of plans for training; leave it out beside --serve"
            )


def run_serving(
    args: argparse.Namespace, overrides: Sequence[Override], given: Any, out: Path | None
) -> int:
    """Plan for serving as asked and return the exit code.

    Args:
        args: See `serving_options`.
        overrides: Put over the recipe.
        given: What the recipe gives.
        out: The first plan's file.

    Raises:
        InputError: It has no whole model of the library.
    """
    from colossax.aot import parse_target
    from colossax.inference.engine import check_format
    from colossax.planner.searching import asked_of
    from colossax.planner.serving import Served, Wish, plan_serving
    from colossax.planner.telling import describe_serving

    config = apply_overrides(given, overrides) if isinstance(given, TrainConfig) else None
    if config is None or config.adapter or config.drafter:
        raise InputError(
            "plan --serve: the recipe gives a task, an adapter or a drafter, and a whole model of"
            " the library is served; give a recipe of one (--list)"
        )
    check_format(args.cache, "--cache")
    if args.weights == "kept":
        raise InputError(
            "--weights kept: are those of a folder that was imported; give int8, fp8, int4 or nf4"
        )
    target = parse_target(args.target or config.target, network=args.network)
    given = {"context": args.context, "cache": args.cache}
    served = Served.of(config.model, weights=args.weights, **given)
    latency = None if args.latency_ms is None else args.latency_ms / 1e3
    asked = asked_of(args.pin, args.forbid)
    answer = plan_serving(
        served,
        _as_served(config.plan, overrides),
        target,
        wish=Wish(seats=args.seats, latency_s=latency, asked=asked),
        top=args.top,
        verify=not args.no_compile,
        device_gb=args.device_gb,
        tell=lambda line: tell(f"{line}\n"),
    )
    with writing(out):
        if out:
            out.write_text(answer.best.plan.to_json() + "\n", "utf-8")
    if args.json:
        facts = {"recipe": config.recipe, "target": target.name, "scored": answer.scored}
        put(json.dumps({**facts, "plans": [one.to_json() for one in answer.plans]}) + "\n")
    else:
        put(describe_serving(f"{config.recipe} on {target.name}", answer, args.out))
    return 0


def _as_served(plan: Plan, overrides: Sequence[Override]) -> Plan:
    """A run's plan with what its cache is kept in, as a checkpoint of the run would have it."""
    if "plan.precision.cache" in dict(overrides):
        return plan
    return plan.replace(precision=dataclasses.replace(plan.precision, cache=plan.precision.compute))


def plan_option(parser: argparse.ArgumentParser) -> None:
    """Declare where else a plan comes from than the checkpoint."""
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="a plan as JSON, such as `colossax plan --serve --out` writes, or auto: that of most"
        " tokens a second on the GPUs that are there is found; --plan.* are put over it",
    )


def plan_asked(
    args: argparse.Namespace, overrides: Sequence[Override], stored: Any, **engine: Any
) -> Plan:
    """The checkpoint's plan, that of a file, or one that is found for the devices that are there.

    Args:
        args: With `plan`.
        overrides: Put over it.
        stored: The checkpoint.
        engine: For `auto`: `seats` and `of_each` of `Wish`, the rest of `Served`; or `requests`,
            see `for_requests`.

    Raises:
        InputError: The file holds no plan; for `auto`, see `target_here` and `plan_serving`.
    """
    from colossax.cli.generate import Options

    if args.plan != "auto":
        given = [] if args.plan is None else [("plan", args.plan)]
        return apply_overrides(Options(plan=stored.plan), [*given, *overrides]).plan
    return _found(args, overrides, stored, **engine)


def _found(
    args: argparse.Namespace, overrides: Sequence[Override], stored: Any, **engine: Any
) -> Plan:
    from colossax.cli.generate import Options
    from colossax.cli.machine.devices import choose_devices
    from colossax.offload import device_memory
    from colossax.planner.auto import find_serving_plan, for_requests, target_here
    from colossax.planner.serving import Served, Wish

    if stored.embeds:
        raise InputError(
            "--plan auto: the model tells embeddings, for which no plans are searched; give the"
            " mesh by hand (--plan.mesh)"
        )
    devices = choose_devices(args.devices)
    target = target_here(devices)
    names = [name for name, _ in overrides]
    for name in (one for one in names if one.startswith(("plan.preset", "plan.rules"))):
        raise InputError(
            f"--plan auto finds mesh and rules, and --{name} gives them; leave one of them out"
        )
    for name in (one for one in _UNCOUNTED if getattr(args, one, None)):
        raise InputError(
            f"--plan auto: what --{name.replace('_', '-')} needs is not counted yet; give the mesh"
            " by hand (--plan.mesh), or leave it out"
        )
    if "requests" in engine:
        engine |= for_requests(*engine.pop("requests"))
    wish = Wish(**{name: engine.pop(name) for name in ("seats", "of_each") if name in engine})
    return find_serving_plan(
        Served(make_model=stored.make_model, weights=args.weights, **engine),
        apply_overrides(Options(plan=stored.plan), overrides).plan,
        target,
        wish=wish,
        mesh_given="plan.mesh" in names,
        memory=device_memory(devices, None),
        tell=lambda line: tell(f"{line}\n"),
    )
