"""Sums of digits learned from rewards alone, by five seeds: rewards of each step, and a picture.

A model of 0.1 M parameters is taught answers of which one in five is right; then it answers, an
answer is worth 1 where it is right, and it learns from that (`train grpo`). Ends with status 1
where a seed begins above 30 % right, ends below 90 %, or takes more than five minutes of a
processor. Seeds that `--out` holds are not run again.

    python bench/grpo_sums.py [--seeds N] [--out FILE] [--plot FILE]
"""

import functools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import seeds

sys.path.insert(0, str(common.REPOSITORY))  # the run is a part of the tests

STEPS, BEGINNING, END = 250, 5, 20
LOW, HIGH, LONGEST_S = 0.3, 0.9, 300.0


def main(objective: str = "grpo") -> int:
    """Run what is new, draw all, and return the exit code."""
    args = seeds.arguments(__doc__.splitlines()[0], f"{objective}_sums")
    os.environ.setdefault("PYTHONPATH", str(common.REPOSITORY))  # for those who reward
    run = functools.partial(_run, objective=objective)
    found = seeds.measured(args, run, lambda one: len(one["rewards"]) == STEPS)
    return _told(found, args.plot)


def _run(seed: int, objective: str) -> dict[str, Any]:
    from tests.tasks.posttraining import arithmetic

    before = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        arithmetic.taught(Path(name), seed)
        began = time.process_time()
        found = arithmetic.learned(Path(name), STEPS, seed, objective)
    return {
        "rewards": [one["reward"] for one in found],
        "entropy": [one["entropy"] for one in found],
        "teaching_cpu_s": began - before,
        "cpu_s": time.process_time() - began,
    }


def _told(found: dict[str, Any], plot: Path) -> int:
    from colossax.run.plot import smooth

    rows, fine, curves = [], True, {}
    for seed, one in found.items():
        first, last = _mean(one["rewards"][:BEGINNING]), _mean(one["rewards"][-END:])
        fine &= first <= LOW and last >= HIGH and one["cpu_s"] <= LONGEST_S
        rows.append((seed, f"{first:.3f}", f"{last:.3f}", f"{one['cpu_s']:.0f}"))
        curves[seed] = range(1, len(one["rewards"]) + 1), smooth(one["rewards"])
    head = ("seed", f"right, first {BEGINNING} steps", f"last {END}", "CPU seconds")
    print(common.table(head, rows))
    seeds.draw(curves, plot, y="share of answers that are right")
    return int(not fine)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
