"""The disk tier's pass beside the disk itself: what share of its bandwidth an update keeps.

    python bench/disk_tier.py [--path FOLDER] [--records 16] [--record-mib 128] [--repeats 5]

One file of records (float32 weights and two Adam moments each), two epochs, 4 GiB by default. By
turns in one process:

- raw: one thread reads all records of an epoch and another writes all records of the next, nothing
  else: same file, same blocks, O_DIRECT, no checksum, no computing;
- pipeline: `RecordStore.update` with Adam, and `commit`; checksums verified and made;
- serial: read, Adam and write of one record after another, as a loop without threads has it.

All three end with `fdatasync`. Gigabytes per second and direction; the bar is the median of the
ratios of neighbouring runs. Beside it: how fast the checksum is, and Adam alone.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import common
import numpy as np

from colossax.offload.disk import RecordLayout, RecordStore
from colossax.offload.disk.checksum import checksum
from colossax.offload.disk.file import BlockFile, aligned_buffer

BAR = 0.8
CHUNK = 32768  # items: five chunks of float32 fit in a second-level cache
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8

Arrays = Mapping[str, np.ndarray]


def main() -> int:
    """Measure, print, write bench/results/disk_tier.json; 1 where the bar does not hold."""
    args = arguments()
    result: dict[str, Any] = {
        "benchmark": "disk_tier",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "records": args.records,
        "record_bytes": args.record_mib << 20,
    }
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        result |= measure(Path(folder) / "store", args)
    show(result)
    if not args.dry:
        common.write_json(common.HERE / "results" / "disk_tier.json", result)
    return 0 if result["ratio"] >= BAR else 1


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--path", default=tempfile.gettempdir(), help="folder on the disk to measure"
    )
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--record-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--update", choices=("numpy", "xla"), default="numpy")
    parser.add_argument("--dry", action="store_true", help="write no JSON")
    return parser.parse_args()


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one file."""
    items = (args.record_mib << 20) // 12 // 1024 * 1024
    layout = RecordLayout({name: ((items,), np.dtype(np.float32)) for name in ("w", "m", "v")})
    gradient = np.random.default_rng(0).standard_normal(items, np.float32)
    update = {"numpy": numpy_adam, "xla": xla_adam}[args.update](gradient)
    with RecordStore.create(path, layout, args.records) as store:
        fill(store)
        moved = args.records * (layout.payload_bytes + 4096)
        epochs = {"now": 0}
        ways: dict[str, Callable[[], None]] = {
            "raw": lambda: raw(store, epochs["now"]),
            "pipeline": lambda: pipeline(store, epochs, update),
            "serial": lambda: serial(store, epochs, update),
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.repeats + 1):
            for name, way in ways.items():
                seconds = timed(way)
                if turn:  # the first touches buffers and unwritten parts of the file
                    samples[name].append(moved / seconds / 1e9)
        facts = {
            "direct": store.direct,
            "file_bytes": store.bytes,
            "held_bytes": store.memory_bytes,
        }
    ratios = [p / r for p, r in zip(samples["pipeline"], samples["raw"], strict=True)]
    return {
        **facts,
        "update": args.update,
        "gb_per_s": samples,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "alone": alone(layout, update),
    }


def fill(store: RecordStore) -> None:
    """Epoch 0: weights of noise, moments of zero."""
    noise = np.random.default_rng(1)
    shape, dtype = store.layout.arrays["w"]
    zeros = np.zeros(shape, dtype)
    for record in range(store.records):
        store.fill(
            record, {"w": noise.standard_normal(shape, np.float32), "m": zeros, "v": zeros}, 0
        )
    store.commit(0)


def raw(store: RecordStore, epoch: int) -> None:
    """Read the slots of an epoch and write those of the next, a thread each."""
    file, places = store._file, store._places

    def move(how: Callable[[BlockFile, np.ndarray, int], None], epoch: int) -> None:
        buffer = BUFFERS.setdefault(how.__name__, aligned_buffer(places.slot_bytes))
        for record in range(store.records):
            how(file, buffer, places.slot(record, epoch))

    threads = [
        threading.Thread(target=move, args=(BlockFile.read, epoch)),
        threading.Thread(target=move, args=(BlockFile.write, epoch + 1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.sync()


BUFFERS: dict[str, np.ndarray] = {}


def pipeline(store: RecordStore, epochs: dict[str, int], update: Callable[..., Arrays]) -> None:
    """One update and its commit."""
    store.update(epochs["now"], update)
    store.commit(epochs["now"] + 1)
    epochs["now"] += 1


def serial(store: RecordStore, epochs: dict[str, int], update: Callable[..., Arrays]) -> None:
    """The same, one thing at a time."""
    for record in range(store.records):
        store.fill(record, update(record, store.read(record)), epochs["now"] + 1)
    store.commit(epochs["now"] + 1)
    epochs["now"] += 1


def numpy_adam(gradient: np.ndarray) -> Callable[[int, Arrays], Arrays]:
    """Adam in place, a chunk at a time so that it stays in the cache."""
    scratch = np.empty(CHUNK, np.float32)

    def update(record: int, arrays: Arrays) -> Arrays:
        for begin in range(0, len(gradient), CHUNK):
            part = slice(begin, begin + CHUNK)
            g, (w, m, v) = gradient[part], (arrays[name][part] for name in "wmv")
            adam_chunk(g, w, m, v, scratch[: len(g)])
        return arrays

    return update


def adam_chunk(g: Any, w: Any, m: Any, v: Any, t: Any) -> None:
    """m += (1 - b1) (g - m); v += (1 - b2) (g^2 - v); w -= rate m / (sqrt(v) + eps)."""
    np.subtract(g, m, out=t)
    np.multiply(t, np.float32(1 - BETA1), out=t)
    np.add(m, t, out=m)
    np.multiply(g, g, out=t)
    np.subtract(t, v, out=t)
    np.multiply(t, np.float32(1 - BETA2), out=t)
    np.add(v, t, out=v)
    np.sqrt(v, out=t)
    np.add(t, np.float32(EPSILON), out=t)
    np.divide(m, t, out=t)
    np.multiply(t, np.float32(RATE), out=t)
    np.subtract(w, t, out=w)


def xla_adam(gradient: np.ndarray) -> Callable[[int, Arrays], Any]:
    """Adam as one jitted program on the CPU; its results are copied into the ring."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    @jax.jit
    def step(g: Any, state: Any) -> Any:
        m = state["m"] + (1 - BETA1) * (g - state["m"])
        v = state["v"] + (1 - BETA2) * (g * g - state["v"])
        return {"w": state["w"] - RATE * m / (v**0.5 + EPSILON), "m": m, "v": v}

    on_device = jax.device_put(gradient)

    def update(record: int, arrays: Arrays) -> Any:
        return step(on_device, {name: jax.dlpack.from_dlpack(a) for name, a in arrays.items()})

    return update


def alone(layout: RecordLayout, update: Callable[[int, Arrays], Any]) -> dict[str, float]:
    """Gigabytes per second of what the pass adds to the disk's work, nothing beside it."""
    payload = aligned_buffer(layout.payload_bytes)
    arrays = layout.views(payload)
    for name, array in arrays.items():
        array[...] = np.random.default_rng(len(name)).random(array.shape, np.float32)
    ways = {
        "adam": lambda: [np.asarray(x) for x in update(0, arrays).values()],
        "checksum": lambda: checksum(payload),
        "crc32": lambda: zlib.crc32(payload),
    }
    return {
        name: len(payload) / statistics.median(timed(way) for _ in range(5)) / 1e9
        for name, way in ways.items()
    }


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def show(result: dict[str, Any]) -> None:
    """The table."""
    rows = [
        [name, statistics.median(samples), " ".join(f"{x:.3f}" for x in samples)]
        for name, samples in result["gb_per_s"].items()
    ]
    rows += [[f"{name} alone", speed, ""] for name, speed in result["alone"].items()]
    print(common.table(["way", "GB/s", "samples"], rows))
    ratios = " ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    print(f"O_DIRECT {'in force' if result['direct'] else 'refused'}")
    print(f"pipeline over raw: {result['ratio']:.3f}, bar {BAR} ({ratios})")


if __name__ == "__main__":
    sys.exit(main())
