"""Optimizers beside AdamW at equal steps: validation losses on the same text, seed by seed.

One recipe, the same tokens in the same order, the same learning rate, decay and schedule: what
differs is the optimizer's name, and numbers of its own behind colons.

    python bench/optimizers.py [--recipe llama_tiny] [--names adamw,muon] [--seeds 2] [--steps N]
    python bench/optimizers.py --names adamw,galore:rank=32:interval=20

Runs go one after another; each is written to the JSON when it ends.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import common
import jobs

from colossax.recipes import recipe

VALIDATIONS = 5
"""Points of a curve."""


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.names.split(",")}
    for seed in range(arguments.seeds):
        for name in runs:
            runs[name].append(_run(name, seed, arguments))
            common.write_json(arguments.out, _result(runs, arguments))
            print(f"seed {seed}, {name}: {runs[name][-1]['final']:.4f}", file=sys.stderr)
    rows = [[name, one["seed"], one["final"], one["cpu_s"]] for name in runs for one in runs[name]]
    print(common.table(["optimizer", "seed", "validation loss", "CPU-seconds"], rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="llama_tiny")
    parser.add_argument("--names", default="adamw,muon")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "optimizers.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    words = ["--worker", name, "--seed", str(seed), "--steps", str(arguments.steps)]
    words += ["--recipe", arguments.recipe]
    return common.run_worker(Path(__file__).resolve(), words, JAX_PLATFORMS="cpu", XLA_FLAGS="")


def _work(arguments: argparse.Namespace) -> None:
    config = recipe(arguments.recipe)
    name, *settings = arguments.worker.split(":")
    numbers: dict[str, Any] = {
        field: json.loads(value) for field, value in (each.split("=") for each in settings)
    }
    config = config.replace(
        optimizer=dataclasses.replace(config.optimizer, name=name, **numbers),
        steps=arguments.steps,
        seed=arguments.seed,
    )
    print(json.dumps(jobs.validated(config, points=VALIDATIONS)[1]))


def _result(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    config = recipe(arguments.recipe)
    return {
        "benchmark": "optimizers",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "recipe": arguments.recipe,
        "steps": arguments.steps,
        "recipe_steps": config.steps,
        "peak_lr": config.optimizer.peak_lr,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
