"""Options of the verbs that compile or measure, whose own modules need JAX to be read.

Help, and what can be refused without JAX, comes from here at once.
"""

import argparse
import importlib
import json
from importlib import resources
from pathlib import Path

from colossax.cli.options.arguments import (
    keeping,
    number,
    plan_of_a_file,
    real,
    recipe_of_a_file,
    several_processes,
)
from colossax.cli.options.overrides import Override, apply_overrides
from colossax.cli.options.recipes import list_recipes
from colossax.cli.serving.plans import serving_options
from colossax.config import above, within
from colossax.errors import InputError
from colossax.recipes import recipe

DESCRIPTION = {
    "inspect": (
        "Compile a recipe's training step for GPUs that are not there, and count: device memory\n"
        "by term, collectives by mesh axis, time at the roofline. Nothing is run or allocated.\n"
        "Several targets or presets, divided by commas, are compared in one table."
    ),
    "plan": (
        "Find the fastest plan that fits a target: every mesh, microbatch and choice of what\n"
        "layers keep is scored by formula, and the best are compiled for the target, so that no\n"
        "plan is named that does not fit. Global batch and length of rows stay as they are.\n"
        "Nothing is run or allocated."
    ),
    "bench": (
        "Measure what is there. kernels: each kernel's implementations on the device of this\n"
        "machine, checked against float64 and then timed by turns, beside a matmul and a copy of\n"
        "the same run. A CPU takes smaller shapes, in float32.\n"
        "offload: copies between host and device memory, optimizer updates on CPU and device, and\n"
        "a matmul; on a GPU, whether pipelined transfers change losses; kept in the cache folder,\n"
        "for plans that put states in host memory.\n"
        "stages RECIPE: a layer's forward and backward pass on each device, and their speeds;\n"
        "links RECIPE: what a layer hands on, moved from each device to the next. Both are kept\n"
        "in the cache folder, for pipelines whose stages are cut by speed.\n"
        "serve URL: a server of `colossax serve`, by its HTTP interface: requests at random\n"
        "times, what they wait for, and how many are served well."
    ),
    "check": (
        "Say what this machine has and what is missing: versions, devices, links, kernels and\n"
        "extras; where there are several devices, whether collectives along each mesh axis\n"
        "give the right values, and how fast; on a GPU that our kernels are for, which of them\n"
        "prove themselves there, which takes minutes once. Exit code 1 when devices or a\n"
        "collective fail."
    ),
}


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declare the options of the verb."""
    {"inspect": _inspect, "plan": _plan, "bench": _bench, "check": _check}[verb](parser)


def run(verb: str, args: argparse.Namespace, overrides: list[Override]) -> int:
    """Refuse what can be refused at once, then run the verb and return its exit code."""
    if verb in ("inspect", "plan") and args.list:
        return list_recipes(as_json=args.json)
    if verb == "bench" and args.what == "serve":
        return _bench_serve(args, overrides)
    if verb == "bench" and args.recipe is not None and ":" not in args.recipe:
        apply_overrides(recipe(args.recipe), overrides)
    if verb == "inspect" and args.recipe is not None and ":" not in args.recipe:
        of_file = [] if args.plan in (None, "auto") else [("plan", args.plan)]
        for changes in preset_overrides(overrides):
            apply_overrides(recipe(args.recipe), [*of_file, *changes])
    if verb == "plan" and args.recipe is not None and ":" not in args.recipe:
        apply_overrides(recipe(args.recipe), overrides)
    return importlib.import_module(f"colossax.cli.{verb}").run(verb, args, overrides)


def preset_overrides(overrides: list[Override]) -> list[list[Override]]:
    """The overrides of each preset, where `plan.preset` names several divided by commas."""
    presets = next((text.split(",") for name, text in overrides if name == "plan.preset"), [""])
    rest = [(name, text) for name, text in overrides if name != "plan.preset"]
    return [[("plan.preset", preset), *rest] if preset else rest for preset in presets]


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a recipe of `colossax train`, or your own"
    )
    recipe_of_a_file(parser)
    _target(parser)
    plan_of_a_file(parser)
    parser.add_argument(
        "--largest-microbatch",
        action="store_true",
        help="find the most rows of each device at a time that fit; compiles several times",
    )
    parser.add_argument(
        "--compare-layouts",
        metavar="N",
        nargs="?",
        type=int,
        const=0,
        help="what a layer sends and keeps in every legal layout and sequence scheme, cheapest"
        " first; with N only the N that send least by formula are compiled",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per inspection")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program's text here")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="write a picture (PNG) here: memory, bytes sent, the schedule of stages",
    )
    parser.epilog = (
        "any value of the recipe, by its dotted name:\n"
        "  --plan.preset zero3,zero1   --plan.mesh fsdp=4,tensor=2   --plan.batch.microbatch 2\n"
        "  --data.seq_len 4096   --data.global_batch 64\n"
        "  --plan.offload auto   --plan.offload.device_gb 24   --plan.offload.host_gb 96  (per GPU)"
    )


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="GPU:NODESxGPUS[@NETWORK]",
        help=f"such as h100:1x8; GPUs: {', '.join(_gpu_keys())}; islands of several kinds or"
        " networks are joined by +, as h100:2x8@ib+a100:2x8@roce; default: the recipe's own",
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        default="ib",
        help="between nodes, where the target names none: ib, roce or ethernet; default"
        " %(default)s",
    )
    parser.add_argument(
        "--between",
        metavar="NAME",
        default="ethernet",
        help="between the islands of a target, likewise; default %(default)s",
    )


_ASKED = {
    ("--pin", "NAME=VALUE"): "a mesh axis and its size, as tensor=4, or a dim of parameters and"
    " the axis that is to split it, as embed=fsdp; again for more",
    ("--forbid", "AXIS"): "a mesh axis to leave out, as ring; again for more",
    ("--allow", "NAME=VALUE"): "search this beside the plan's own, though it changes values:"
    " state=mixed, bfloat16 or 8bit, reduction=bfloat16, accumulation=bfloat16; again for more",
}
"""Options of `plan` that may be given more than once."""


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a recipe of `colossax train`, or your own"
    )
    recipe_of_a_file(parser)
    _target(parser)
    parser.add_argument(
        "--top",
        metavar="K",
        type=number(1, 20),
        default=3,
        help="plans to compile and name; default %(default)s",
    )
    for (name, metavar), text in _ASKED.items():
        parser.add_argument(name, metavar=metavar, action="append", default=[], help=text)
    parser.add_argument(
        "--device-gb",
        metavar="X",
        type=real(above(0)),
        help="of a device's memory, what a plan may take; default what a step may",
    )
    parser.add_argument(
        "--host-gb",
        metavar="X",
        type=real(above(0)),
        help="of the host's memory, what a plan may take for each device; default nothing",
    )
    parser.add_argument(
        "--disk-gb",
        metavar="X",
        type=real(above(0)),
        help="beside --host-gb, what a file of optimizer state may take for each device",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="name plans by formula alone, which may err by some percent of the memory",
    )
    parser.add_argument(
        "--rates",
        metavar="FILE",
        help="seconds by what colossax bench links wrote here, of such GPUs; else by data sheets",
    )
    keeping(parser)
    parser.add_argument("--out", metavar="FILE", help="write the first plan here, for --plan FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG) here")
    serving_options(parser)
    parser.epilog = (
        "any value of the recipe, by its dotted name:\n"
        "  --data.seq_len 4096   --data.global_batch 64   --plan.precision.compute bfloat16\n"
        "What is searched is found whatever --plan.* says of it: mesh, rules, microbatch, remat,\n"
        "chunks of the loss, stages and batch.reduce_once; tensor layouts are as by default."
    )


def _bench(parser: argparse.ArgumentParser) -> None:
    what = ("kernels", "offload", "stages", "links", "serve")
    parser.add_argument("what", metavar="WHAT", choices=what, help=", ".join(what))
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="stages, links: a recipe of `colossax train`; serve: the server's URL",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        help="cases whose kernel and shape contain it, such as 'backward'; again for more",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=number(1),
        help="stages, links: devices to measure; on a CPU, N are made",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write JSON there; but for kernels, in place of the cache",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row on stdout")
    serve = parser.add_argument_group("serve")
    serve.add_argument(
        "--requests", metavar="N", type=number(1), default=200, help="default %(default)s"
    )
    serve.add_argument(
        "--rate",
        metavar="R",
        type=real(above(0)),
        default=8.0,
        help="requests a second on average, at times of a Poisson process; default %(default)s",
    )
    serve.add_argument(
        "--lengths",
        metavar="FILE",
        type=Path,
        help='JSONL of {"prompt": N, "said": M}, in tokens; default spread as conversations are',
    )
    serve.add_argument(
        "--longest",
        metavar="N",
        type=number(1),
        default=512,
        help="most tokens of a prompt, and of what is said; default %(default)s",
    )
    serve.add_argument(
        "--cancelled",
        metavar="S",
        type=real(within(0, 1)),
        default=0.0,
        help="share of the requests that are given up halfway; default %(default)s",
    )
    serve.add_argument("--seed", metavar="S", type=number(0, 2**32 - 1), default=0)
    serve.add_argument("--key", metavar="KEY", help="the server's, where it wants one")
    serve.add_argument(
        "--first-s",
        metavar="S",
        type=real(above(0)),
        default=1.0,
        help="longest wait for a first token of a request that is served well; default %(default)s",
    )
    serve.add_argument(
        "--between-s",
        metavar="S",
        type=real(above(0)),
        default=0.1,
        help="likewise for each further one, on average; default %(default)s",
    )
    parser.epilog = (
        "stages, links: any value of the recipe, by its dotted name:\n"
        "  --plan.batch.microbatch 2   --plan.remat full   --data.seq_len 4096"
    )


def _bench_serve(args: argparse.Namespace, overrides: list[Override]) -> int:
    if overrides:
        raise InputError(
            f"--{overrides[0][0]}: bench serve has no recipe and no plan; leave it out"
        )
    return importlib.import_module("colossax.cli.benching.serve").run(args)


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", metavar="N", type=number(1), help="devices to use; on a CPU, N are made"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    several_processes(parser)


def _gpu_keys() -> list[str]:
    # `colossax.aot`, which has them too, imports JAX.
    data = resources.files("colossax").joinpath("aot", "targets.json").read_text("utf-8")
    return list(json.loads(data)["gpus"])
