"""What it costs that a checkpoint's files are bound to their places, beside saving and restoring.

    python bench/checkpoint_checks.py [--path FOLDER] [--repeats 7] [--dry]

States of three models, saved and restored: CPU-seconds of all threads, and in them those of the
checks: seals made and compared, metadata compared. The bar is their share, the median of all
repeats, for each state and both ways. A share and not two runs side by side, as one run differs
from the next by more than the checks take.
"""

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import common
import jax
import numpy as np

from colossax.checkpoint import ArraySlot, Checkpointer, commit, folder

BAR = 0.02
STATES = {"128 files": (12, 64, 512), "4 MB files": (12, 512, 8192), "32 MB files": (4, 1536, 8192)}
"""Layers, embed, vocabulary; float32 parameters and two moments each."""


def main() -> int:
    """Measure, print, write bench/results/checkpoint_checks.json; 1 where the bar does not hold."""
    args = arguments()
    rows = {}
    for name, sizes in STATES.items():
        with tempfile.TemporaryDirectory(dir=args.path) as place:
            rows[name] = measure(Path(place), state(*sizes), args.repeats)
    for name, row in rows.items():
        for way in ("save", "restore"):
            cpu = row[way]
            print(
                f"{name:12} {way:8} {1e3 * cpu['all_s']:8.1f} ms of processors,"
                f" {1e3 * cpu['checks_s']:6.2f} of checks, {100 * cpu['share']:.2f} %"
            )
    result = {
        "benchmark": "checkpoint_checks",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "repeats": args.repeats,
        "bar": BAR,
        "states": rows,
    }
    if not args.dry:
        common.write_json(common.HERE / "results" / "checkpoint_checks.json", result)
    return 0 if all(row[w]["share"] <= BAR for row in rows.values() for w in row) else 1


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry", action="store_true", help="write no JSON")
    return parser.parse_args()


def state(layers: int, embed: int, vocab: int) -> list[tuple[ArraySlot, jax.Array]]:
    """Parameters of a language model and AdamW's two moments."""
    shapes = {
        "layers/attn/qkvo/w": (layers, embed, 4 * embed),
        "layers/mlp/up/w": (layers, embed, 4 * embed),
        "layers/mlp/down/w": (layers, 4 * embed, embed),
        "layers/norm/scale": (layers, embed),
        "embed/table": (vocab, embed),
        "norm/scale": (embed,),
    }
    out = []
    for kind in ("params", "optimizer/mu", "optimizer/nu"):
        for name, shape in shapes.items():
            stacked = name.startswith("layers")
            slot = ArraySlot(
                name=f"model/{kind}/{name}",
                shape=shape,
                dtype=np.dtype("float32"),
                first=0 if stacked else None,
                layers=shape[0] if stacked else None,
            )
            values = np.random.default_rng(len(out)).standard_normal(shape, np.float32)
            out.append((slot, jax.numpy.asarray(values)))
    return out


class Spent:
    """CPU-seconds of this process's threads inside some functions; calls within calls once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = threading.local()

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added."""

        def timed(*args: Any, **more: Any) -> Any:
            if getattr(self._inside, "now", False):
                return function(*args, **more)
            self._inside.now, began = True, time.thread_time()
            try:
                return function(*args, **more)
            finally:
                self._inside.now = False
                self.seconds += time.thread_time() - began

        return timed


CHECKS = (
    (commit, "seal"),
    (commit, "_metadata_checksums"),
    (folder.StepFolder, "check_files"),
    (folder.StepFolder, "_layout"),
)
"""What a checkpoint without them would not call; parsing metadata is counted too."""


@contextlib.contextmanager
def timed() -> Iterator[tuple[Spent, common.Clock]]:
    """What the checks and what everything takes inside the block."""
    spent = Spent()
    with contextlib.ExitStack() as stack:
        for owner, name in CHECKS:
            stack.enter_context(mock.patch.object(owner, name, spent.of(getattr(owner, name))))
        yield spent, common.Clock()


def measure(
    place: Path, arrays: list[tuple[ArraySlot, jax.Array]], repeats: int
) -> dict[str, dict[str, Any]]:
    """CPU-seconds of saving and restoring, and of the checks in them."""
    found: dict[str, list[tuple[float, float]]] = {"save": [], "restore": []}
    wants = [(slot, array.sharding) for slot, array in arrays]
    for _ in range(repeats + 1):
        target = place / "checkpoints"
        with timed() as (spent, clock), Checkpointer(target, asynchronous=False) as checkpointer:
            assert checkpointer.save(1, arrays, {"plan": {}})
            found["save"].append((spent.seconds, clock.read()["cpu_s"]))
        with timed() as (spent, clock):
            restored = Checkpointer(target).restore(1, wants)
            found["restore"].append((spent.seconds, clock.read()["cpu_s"]))
        del restored
        shutil.rmtree(target)
    return {
        way: {
            "checks_s": statistics.median(checks for checks, _ in rows[1:]),
            "all_s": statistics.median(whole for _, whole in rows[1:]),
            "share": statistics.median(checks / whole for checks, whole in rows[1:]),
            "repeats": rows[1:],
        }
        for way, rows in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
