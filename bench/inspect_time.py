"""Seconds and memory of `colossax inspect`, each run in a process of its own.

    python bench/inspect_time.py [--out FILE]

Needs the extra `aot`; no GPU.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import common

CASES = (("llama3_8b", "h100:1x8"), ("llama3_70b", "h100:64x8"))
BAR_SECONDS, BAR_GB = 20.0, 6.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "inspect_time.json")
    arguments = parser.parse_args()
    rows = [measure(recipe, target) for recipe, target in CASES]
    result = {
        "benchmark": "inspect_time",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "bars": {"seconds": BAR_SECONDS, "gb": BAR_GB},
        "rows": rows,
    }
    common.write_json(arguments.out, result)
    names = ["recipe", "target", "wall_s", "cpu_s", "compile_s", "peak_gb", "device_gib", "fits"]
    print(common.table(names, [[row[name] for name in names] for row in rows]))


def measure(recipe: str, target: str) -> dict:
    """One inspection: wall and CPU seconds of the whole process, its peak memory."""
    command = [sys.executable, "-m", "colossax", "inspect", recipe, "--target", target, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    return {
        "recipe": recipe,
        "target": target,
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "compile_s": found["compile_s"],
        # The largest of all children so far: later rows can only repeat an earlier one.
        "peak_gb": after.ru_maxrss * 1024 / 1e9,
        "device_gib": found["device_bytes"]["total"] / 2**30,
        "fits": found["fits"],
    }


if __name__ == "__main__":
    main()
