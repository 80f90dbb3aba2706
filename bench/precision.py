"""The main job in a narrower precision beside bfloat16: mean loss of its last steps.

Each run is `llama_stdlib` for as many steps with the same tokens and the same first parameters; the
schedule of the learning rate is that of a run of this length. A run passes where the mean loss of
its last 20 steps is within its bar of that in bfloat16, relative to it.

    python bench/precision.py [--steps 200] [--only NAME ...] [--out FILE]

Matmuls in float8 are emulated. Some minutes of CPU time for each of the runs, which go one after
another. Runs that `--only` leaves out are taken from FILE, where they are of as many steps. Exits 1
where a bar is missed.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import jobs

from colossax.config import Float8, Precision
from colossax.recipes import recipe

BASE = "bfloat16"

RUNS: dict[str, Precision] = {
    BASE: Precision(compute="bfloat16"),
    "float16": Precision(compute="float16"),
    "float8": Precision(compute="bfloat16", matmul="float8"),
    "float8_delayed": Precision(
        compute="bfloat16", matmul="float8", float8=Float8(scaling="delayed")
    ),
}

BARS = {"float16": 0.002, "float8": 0.005, "float8_delayed": 0.005}
"""By how much of the loss in bfloat16 that of a run may differ."""

LAST = 20
"""Steps over which the loss is taken."""


def main() -> int:
    """Measure, write, compare."""
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return 0
    runs = _kept(arguments)
    for name in arguments.only:
        words = ["--worker", name, "--steps", str(arguments.steps)]
        here = Path(__file__).resolve()
        runs[name] = common.run_worker(here, words, JAX_PLATFORMS="cpu", XLA_FLAGS="")
        common.write_json(arguments.out, _result(runs, arguments))
        print(f"{name}: {_end(runs[name]):.5f}", file=sys.stderr)
    result = _result(runs, arguments)
    print(_report(result))
    return 0 if all(row["passes"] for row in result["compared"].values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "precision.json")
    parser.add_argument("--worker", choices=RUNS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _kept(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs of the file that are not made anew."""
    if not arguments.out.exists():
        return {}
    before = json.loads(arguments.out.read_text())
    if before["steps"] != arguments.steps:
        return {}
    return {name: run for name, run in before["runs"].items() if name not in arguments.only}


def _work(arguments: argparse.Namespace) -> None:
    steps, config = arguments.steps, recipe("llama_stdlib")
    config = config.replace(
        plan=config.plan.replace(precision=RUNS[arguments.worker]),
        steps=steps,
        validate_every=0,
        checkpoint_every=0,
    )
    ended, records, spent = jobs.trained(config)
    rows = [row for row in records if "loss" in row]
    print(
        json.dumps(
            {
                "losses": [row["loss"] for row in rows],
                "loss_scale": [row["loss_scale"] for row in rows if "loss_scale" in row],
                "skipped": ended["skipped"],
                "validation_loss": ended["validation_loss"],
                **spent,
            }
        )
    )


def _end(run: dict[str, Any]) -> float:
    return statistics.mean(run["losses"][-LAST:])


def _result(runs: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    compared = {}
    for name in BARS:
        if name in runs and BASE in runs:
            differs = abs(_end(runs[name]) / _end(runs[BASE]) - 1)
            compared[name] = {
                "differs": differs,
                "bar": BARS[name],
                "passes": differs <= BARS[name],
            }
    return {
        "benchmark": "precision",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "job": "llama_stdlib",
        "bar": f"mean loss of the last {LAST} steps beside that in {BASE}, relative",
        "steps": arguments.steps,
        "ends": {name: _end(run) for name, run in runs.items()},
        "compared": compared,
        "runs": runs,
    }


def _report(result: dict[str, Any]) -> str:
    rows = []
    for name, end in result["ends"].items():
        found = result["compared"].get(name)
        told = [f"{found['differs']:.5f}", found["bar"]] if found else ["", ""]
        skipped = result["runs"][name]["skipped"]
        rows.append([name, f"{end:.5f}", *told, skipped])
    names = ["", f"mean loss of the last {LAST}", "differs by", "bar", "skipped"]
    return common.table(names, rows)


if __name__ == "__main__":
    sys.exit(main())
