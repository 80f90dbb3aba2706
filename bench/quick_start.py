"""CPU-seconds of what a user waits for at the command line, beside `import jax` in the same run.

    python bench/quick_start.py [--runs 5] [--train [--samples 3]]

Help and typos take the median of some runs. With `--train`, `train llama_tiny --steps 2` in pairs:
with no program kept, and with those that the first start kept; the text's caches are warm in both,
and of the pairs' ratios the median counts. Writes bench/results/quick_start.json.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

BAR_S = 0.3
BAR_SECOND = 0.5

COMMANDS = (
    "--help",
    "train --help",
    "trian",
    "train lama_tiny",
    "train --lr 3",
    "train llama_tiny --plan.preset fsdp",
    "train llama_tiny --plan.mesh dp=2",
    "inspect llama_tiny --plan.mesh tp=2",
)


def spent(*arguments, **env):
    """CPU-seconds and seconds of a new Python with these arguments."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], env={**os.environ, **env}, capture_output=True)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system, time.perf_counter() - began


def median(runs, *arguments):
    """Of the CPU-seconds of several runs."""
    return statistics.median(spent(*arguments)[0] for _ in range(runs))


def first_line(*arguments):
    """Seconds until standard error has a line."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE) as child:
        child.stderr.readline()
        took = time.perf_counter() - began
        child.kill()
    return took


def main():
    """Print a table; write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--samples", type=int, default=3, help="of each start, by turns")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "quick_start.json")
    args = parser.parse_args()
    jax_s = median(args.runs, "-c", "import jax")
    print(f"{jax_s:6.2f} CPU-s  import jax")
    rows = []
    for command in COMMANDS:
        took = median(args.runs, "-m", "colossax", *command.split())
        verdict = "" if took < BAR_S else f"  ABOVE {BAR_S}"
        print(f"{took:6.2f} CPU-s  {took / jax_s:5.2f} x  colossax {command}{verdict}")
        rows.append({"command": command, "cpu_s": took, "of_import_jax": took / jax_s})
    result = {
        "benchmark": "quick_start",
        "bars": {"cpu_s": BAR_S, "second_of_first": BAR_SECOND, "first_line_s": 1.0},
        "hardware": common.hardware(),
        "versions": common.versions(),
        "load_before": os.getloadavg()[0],
        "import_jax_cpu_s": jax_s,
        "rows": rows,
        **({"train": starts(args.samples)} if args.train else {}),
    }
    common.write_json(args.out, result)


def starts(samples):
    """First and second starts of the same training by turns, each pair with programs of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "colossax", "train", "llama_tiny", "--steps=2", "--devices=1"]
        run = lambda name, *more: spent(  # noqa: E731
            *words, f"--out={Path(folder) / name}", *more, COLOSSAX_CACHE=folder
        )
        run("corpus", "--no-cache")
        took = {"first": [], "second": []}
        for sample in range(samples):
            shutil.rmtree(Path(folder) / "programs", ignore_errors=True)
            for name, seconds in took.items():
                seconds.append(run(f"{name}-{sample}")[0])
        ratios = [b / a for a, b in zip(took["first"], took["second"], strict=True)]
        found = {name: spread(seconds) for name, seconds in took.items()}
        found["second_of_first"] = spread(ratios)
        for name in took:
            print(f"{said(found[name])} CPU-s  {name} start of train llama_tiny")
        verdict = "" if found["second_of_first"]["median"] <= BAR_SECOND else "  ABOVE"
        print(f"{said(found['second_of_first'])}  second / first; bar {BAR_SECOND}{verdict}")
        found["first_line_s"] = first_line(*words, f"--out={Path(folder) / 'line'}")
        print(f"first line after {found['first_line_s']:.2f} s; bar 1")
        return found


def spread(values):
    """Median, least and most, with all of them."""
    ends = {"least": min(values), "most": max(values)}
    return {"median": statistics.median(values), **ends, "all": values}


def said(found):
    """For people."""
    return f"{found['median']:6.2f} ({found['least']:.2f} to {found['most']:.2f})"


if __name__ == "__main__":
    main()
