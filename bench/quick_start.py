"""CPU-seconds of what a user waits for at the command line, beside `import jax` in the same run.

    python bench/quick_start.py [--runs 5] [--train]

Help and typos take the median of some runs. With `--train`, `train llama_tiny --steps 2` twice:
with no program kept, and with those that the first start kept; the text's caches are warm in both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()
    jax_s = median(args.runs, "-c", "import jax")
    print(f"{jax_s:6.2f} CPU-s  import jax")
    for command in COMMANDS:
        took = median(args.runs, "-m", "colossax", *command.split())
        verdict = "" if took < BAR_S else f"  ABOVE {BAR_S}"
        print(f"{took:6.2f} CPU-s  {took / jax_s:5.2f} x  colossax {command}{verdict}")
    if args.train:
        starts()


def starts():
    """Two starts of the same training."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "colossax", "train", "llama_tiny", "--steps=2", "--devices=1"]
        run = lambda name, *more: spent(  # noqa: E731
            *words, f"--out={Path(folder) / name}", *more, COLOSSAX_CACHE=folder
        )
        run("corpus", "--no-cache")
        took = {name: run(name) for name in ("first", "second")}
        for name, (cpu_s, wall_s) in took.items():
            print(f"{cpu_s:6.2f} CPU-s  {wall_s:5.2f} s  {name} start of train llama_tiny")
        print(f"second / first: {took['second'][0] / took['first'][0]:.2f}; bar {BAR_SECOND}")
        line = first_line(*words, f"--out={Path(folder) / 'line'}")
        print(f"first line after {line:.2f} s; bar 1")


if __name__ == "__main__":
    main()
