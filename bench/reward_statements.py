"""Rewards learned from statements of Python, each beside itself with its words shuffled.

A model of 0.2 M parameters reads the source of the standard library for 100 steps; then it learns,
by `train reward`, to give the statement that follows another in a function more than the same words
in another order. Five seeds; a picture of how often it does so on what is held out. Ends with
status 1 where a seed ends below 95 %, or takes more than five minutes of a processor. Seeds that
`--out` holds are not run again.

    python bench/reward_statements.py [--seeds N] [--out FILE] [--plot FILE]
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import seeds

sys.path.insert(0, str(common.REPOSITORY))  # the run is a part of the tests

STEPS = 400
RIGHT, LONGEST_S = 0.95, 300.0


def main() -> int:
    """Run what is new, draw all, and return the exit code."""
    from tests.tasks.posttraining import statements

    args = seeds.arguments(__doc__.splitlines()[0], "reward_statements")
    found = seeds.measured(args, _run, lambda one: one["steps"][-1] == STEPS)
    rows, fine = [], True
    for seed, one in found.items():
        first, *_, last = one["right"]
        fine &= last >= RIGHT and one["cpu_s"] <= LONGEST_S
        rows.append((seed, f"{first:.3f}", f"{last:.3f}", f"{one['cpu_s']:.0f}"))
    head = ("seed", f"right, {statements.EVERY} steps", f"{STEPS} steps", "CPU seconds")
    print(common.table(head, rows))
    curves = {seed: (one["steps"], one["right"]) for seed, one in found.items()}
    seeds.draw(curves, args.plot, y="share of held-out pairs that are right", chance=0.5)
    return int(not fine)


def _run(seed: int) -> dict[str, Any]:
    from tests.tasks.posttraining import statements

    before = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statements.learned(folder, STEPS, seed)
        lines = (folder / "reward" / "metrics.jsonl").read_text("utf-8").splitlines()
    told = [one for one in map(json.loads, lines) if "validation_accuracy" in one]
    return {
        "steps": [one["step"] for one in told],
        "right": [one["validation_accuracy"] for one in told],
        "cpu_s": time.process_time() - before,
    }


if __name__ == "__main__":
    sys.exit(main())
