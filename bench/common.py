"""What the benchmarks share: clocks, facts about machine and versions, tables, JSON.

Imports nothing beyond the standard library, so that a worker pays for its own imports alone.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "colossax")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores open to this process, memory, GPU where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"processor": _processor(), "cores": cores}
    if hasattr(os, "sysconf"):
        facts["memory_gib"] = round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        )
    gpu = _gpu()
    return {**facts, "gpu": gpu} if gpu else facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _gpu() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Clock:
    """CPU-seconds (all threads of the process) and wall seconds since it was made."""

    def __init__(self):
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds since the clock was made."""
        return {
            "cpu_s": time.process_time() - self.cpu,
            "wall_s": time.perf_counter() - self.wall,
        }


def repeat(run: Callable[[int], Any], *, steps: int, repeats: int) -> list[dict[str, float]]:
    """Seconds per step of `repeats` runs of `run(steps)`, which ends only when all is done."""
    out = []
    for _ in range(repeats):
        clock = Clock()
        run(steps)
        out.append({name: seconds / steps for name, seconds in clock.read().items()})
    return out


def median(rows: Sequence[dict[str, float]], name: str) -> float:
    """Median of one column."""
    return statistics.median(row[name] for row in rows)


def run_worker(
    script: Path, arguments: Sequence[str], *, python: str = sys.executable, **environment: str
) -> dict[str, Any]:
    """Run a worker script in a process of its own; its last line of output is JSON.

    Raises:
        RuntimeError: It failed; the message ends with what it wrote to standard error.
    """
    own = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    paths = filter(None, [str(REPOSITORY), str(HERE), own])
    done = subprocess.run(
        [python, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as text, columns aligned; numbers to four digits."""
    shown = [list(map(_show, row)) for row in [header, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
