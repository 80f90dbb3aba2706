"""What Python adds to a training step: time of the loop less time of the compiled step.

The loop is the trainer's own, with all it does at each step: the data loader and its threads, the
batch placed on the device, `Step.__call__`, the metrics of the step before read, a record written
to metrics.jsonl and TensorBoard. The compiled step alone is called as often with a batch already
on the device. The two take turns; the medians are compared, in wall time and in CPU time of the
main thread (which shows what the loop costs where another thread hides it).

The model has one layer and takes some milliseconds a step.

    python bench/host_overhead.py [--out FILE]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

import jax
import optax

import colossax
from colossax.data import BatchLoader, SyntheticRows, global_arrays, wanted_rows
from colossax.models import LlamaConfig, maker
from colossax.planner.counting.flops import Yardstick
from colossax.processes import Gate
from colossax.run.meter import Meter
from colossax.run.progress import Silent
from colossax.run.records import Records
from colossax.run.run import Hooks, Loop, Schedule
from colossax.run.trackers import About
from colossax.sharding import activation_sharding
from colossax.tasks import next_token_loss
from colossax.typing import TEXT_BATCH_DIMS

MODEL = {"vocab": 512, "embed": 128, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 384}
ROWS, SEQ = 8, 128
BAR_MS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="steps per turn")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "host_overhead.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.steps, arguments.turns)
    result = {
        "benchmark": "host_overhead",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "model": MODEL,
        "batch": [ROWS, SEQ],
        "bar_ms": BAR_MS,
        **rows,
    }
    common.write_json(arguments.out, result)
    names = ("compiled", "loop")
    shown = [[name, rows[name]["wall_ms"], rows[name]["main_thread_ms"]] for name in names]
    shown.append(["added", rows["added_wall_ms"], rows["added_main_thread_ms"]])
    print(common.table(["ms per step", "wall", "CPU of the main thread"], shown))


def measure(folder: Path, steps: int, turns: int) -> dict[str, Any]:
    """Medians over turns of the compiled step alone and of the loop."""
    state, step = colossax.boost(
        maker(LlamaConfig(**MODEL, max_seq=SEQ)),
        optax.adamw(3e-4),
        next_token_loss(),
        colossax.Plan(),
        devices=jax.devices()[:1],
        clip_norm=1.0,
    )
    rows = SyntheticRows(vocab_size=MODEL["vocab"], seq_len=SEQ, seed=0)
    shardings = {
        name: activation_sharding(step.bound, dims, (ROWS, SEQ))
        for name, dims in TEXT_BATCH_DIMS.items()
    }
    wanted = wanted_rows(shardings["tokens"], (ROWS, SEQ))
    records = Records(About(folder=folder, name="overhead", config={}, from_step=0), report=print)
    hooks = Hooks(
        record=records.write,
        validate=lambda state: {},
        save=lambda state, done: None,
        progress=Silent(),
    )
    seconds: dict[str, list[tuple[float, float]]] = {"compiled": [], "loop": []}
    with BatchLoader(rows, ROWS, wanted=wanted) as loader:
        batches = (global_arrays(local, wanted, shardings, ROWS) for local in loader)
        batch = next(batches)
        compiled = step.lower(state, batch).compile()

        def alone(state: Any) -> Any:
            for _ in range(steps):
                state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics)
            return state

        def loop(state: Any) -> Any:
            schedule = Schedule(steps=steps, validate_every=0, checkpoint_every=0)
            meter = Meter(Yardstick(flops_per_token=1, peak=None))
            return Loop(step, schedule, hooks, Gate(), meter).run(state, batches, 0)[0]

        runs: dict[str, Callable[[Any], Any]] = {"compiled": alone, "loop": loop}
        for turn in range(turns + 1):
            for name, run in runs.items():
                wall, cpu = time.perf_counter(), time.thread_time()
                state = run(state)
                spent = (time.perf_counter() - wall, time.thread_time() - cpu)
                if turn:  # the first turn compiles and fills the loader
                    seconds[name].append(spent)
    records.close()
    return _medians(seconds, steps)


def _medians(seconds: dict[str, list[tuple[float, float]]], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pairs in seconds.items():
        wall, cpu = ([1e3 * x / steps for x in column] for column in zip(*pairs, strict=True))
        found[name] = {
            "wall_ms": statistics.median(wall),
            "main_thread_ms": statistics.median(cpu),
            "all_wall_ms": wall,
        }
    for kind in ("wall_ms", "main_thread_ms"):
        found[f"added_{kind}"] = found["loop"][kind] - found["compiled"][kind]
    return found


if __name__ == "__main__":
    main()
