"""What it costs that a checkpoint's files are bound to their places, beside saving and restoring.

    python bench/checkpoint_checks.py [--path FOLDER] [--repeats 7] [--dry]

States of three models, saved and restored by turns with and without the checks in one process:
seals made and compared, metadata compared. Without them the same code runs with sealing and
comparing replaced by nothing. CPU-seconds of all threads; the bar is the median of the ratios of
neighbouring runs, for each state and both ways.
"""

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import common
import jax
import numpy as np

from colossax.checkpoint import ArraySlot, Checkpointer, commit, folder

BAR = 1.02
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
                f"{name:12} {way:8} {cpu['with']:7.3f} s of processors,"
                f" {cpu['without']:7.3f} without checks, ratio {cpu['ratio']:.4f}"
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
    return 0 if all(row[w]["ratio"] <= BAR for row in rows.values() for w in row) else 1


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


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """The same without sealing and comparing."""
    with (
        mock.patch.object(commit, "seal", lambda *_: 0),
        mock.patch.object(commit, "_metadata_checksums", lambda *_: {}),
        mock.patch.object(folder.StepFolder, "check_files", lambda *_: None),
        mock.patch.object(folder.StepFolder, "_layout", lambda *_: None),
    ):
        yield


def measure(
    place: Path, arrays: list[tuple[ArraySlot, jax.Array]], repeats: int
) -> dict[str, dict[str, Any]]:
    """CPU-seconds of saving and restoring, with and without checks by turns."""
    seconds: dict[tuple[str, str], list[float]] = {}
    wants = [(slot, array.sharding) for slot, array in arrays]
    for turn in range(repeats + 1):
        modes = ("with", "without") if turn % 2 else ("without", "with")
        for mode in modes:
            target = place / mode
            with contextlib.nullcontext() if mode == "with" else unchecked():
                clock = common.Clock()
                with Checkpointer(target, asynchronous=False) as checkpointer:
                    assert checkpointer.save(1, arrays, {"plan": {}})
                saved = clock.read()
                clock = common.Clock()
                restored = Checkpointer(target).restore(1, wants)
                read = clock.read()
            del restored
            shutil.rmtree(target)
            if turn:  # the first warms up
                for way, spent in (("save", saved), ("restore", read)):
                    seconds.setdefault((way, mode), []).append(spent["cpu_s"])
    out: dict[str, dict[str, Any]] = {}
    for way in ("save", "restore"):
        medians = {mode: statistics.median(seconds[way, mode]) for mode in ("with", "without")}
        ratios = [a / b for a, b in zip(seconds[way, "with"], seconds[way, "without"], strict=True)]
        out[way] = {
            **medians,
            "ratio": statistics.median(ratios),
            "cpu_s": {mode: seconds[way, mode] for mode in ("with", "without")},
        }
    return out


if __name__ == "__main__":
    sys.exit(main())
