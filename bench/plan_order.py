"""The order in which formulas put 24 plans, against the order in which they run.

Eight fake CPU devices share this machine's cores, so what is compared is CPU-seconds of a step, all
devices together: the truth is a step of the library, the formula that of `colossax plan` with rates
measured here. Those come of steps of another model on copies of all (matmuls, updates, what a
microbatch and a step cost whatever they hold) and of collectives alone (a link for each kind).
Nothing is beside anything: there is none but these cores. Plans are measured in turns, so that
whatever else the machine does meets all of them.

Ends with status 1 where the rank correlation (Spearman's) is below 0.7.

    python bench/plan_order.py [--rounds N] [--out FILE]
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import common  # noqa: E402 (after the settings above)

sys.path.insert(0, str(common.REPOSITORY))

DEVICES, BAR = 8, 0.7
MODEL = {"vocab": 1024, "embed": 512, "layers": 2, "heads": 8, "kv_heads": 8, "mlp": 1408}
ROWS, SEQ = 32, 32


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan."""

    preset: str
    mesh: dict[str, int]
    remat: str = "none"
    accumulation: int = 1

    @property
    def name(self) -> str:
        """For people."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{mesh} {self.preset}, {self.remat}, accumulation {self.accumulation}"


SPLIT = "zero3+megatron_sp"
CASES = (
    Case("zero3", {"data": 8}),
    Case("zero3", {"data": 8}, "full"),
    Case("zero3", {"data": 8}, "none", 4),
    Case("zero3", {"data": 8}, "attention", 2),
    Case("zero3", {"fsdp": 8}),
    Case("zero3", {"fsdp": 8}, "full"),
    Case("zero3", {"fsdp": 8}, "attention", 2),
    Case("zero3", {"fsdp": 8}, "full", 4),
    Case("zero2", {"fsdp": 8}),
    Case("zero2", {"fsdp": 8}, "full", 4),
    Case("zero3", {"data": 2, "fsdp": 4}),
    Case("zero3", {"data": 4, "fsdp": 2}, "full", 2),
    Case("zero2", {"data": 2, "fsdp": 4}, "attention", 4),
    Case(SPLIT, {"fsdp": 4, "tensor": 2}),
    Case(SPLIT, {"fsdp": 4, "tensor": 2}, "full", 2),
    Case(SPLIT, {"fsdp": 2, "tensor": 4}, "attention"),
    Case(SPLIT, {"fsdp": 2, "tensor": 4}, "full", 4),
    Case(SPLIT, {"tensor": 8}),
    Case("zero3+megatron", {"data": 4, "tensor": 2}),
    Case("zero3", {"fsdp": 4, "ring": 2}),
    Case("zero3", {"fsdp": 2, "ring": 4}, "full", 2),
    Case("zero3", {"fsdp": 4, "ulysses": 2}),
    Case("zero3", {"fsdp": 2, "ulysses": 4}, "full", 4),
    Case("zero3", {"data": 2, "ring": 2, "ulysses": 2}, "attention", 2),
)


OTHERS = (
    (Case("zero3", {"data": 8}), {"layers": 1}),
    (Case("zero3", {"data": 8}, "none", 4), {"layers": 1}),
    (Case("zero3", {"data": 8}), {"layers": 1, "rows": 64}),
    (Case("zero3", {"data": 8}, "full"), {"layers": 3, "mlp": 704}),
)
"""Steps by which rates are measured: none is of the model of the plans."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
KIB, REPEATS = (32, 256, 1024), 16


def run_of(case: Case, *, rows: int = ROWS, seq: int = SEQ, **sizes: int) -> Any:
    """The run of a plan, of a model that may have other sizes."""
    from colossax.config import AttentionConfig, BatchConfig, Segment, preset
    from colossax.models import LlamaConfig
    from colossax.recipes import recipe

    config = recipe("llama_tiny")
    plan = preset(
        case.preset,
        mesh=case.mesh,
        segments=(Segment(remat=case.remat),),
        batch=BatchConfig(accumulation=case.accumulation),
        attention=AttentionConfig(kernel="xla"),
    )
    data = dataclasses.replace(config.data, seq_len=seq, global_batch=rows)
    return config.replace(
        model=LlamaConfig(**{**MODEL, **sizes}, max_seq=512), data=data, plan=plan
    )


def stepper(config: Any) -> Callable[[], float]:
    """Compiles a run's step and runs it once; each call gives CPU-seconds of one more."""
    import jax
    import numpy as np

    from colossax.planner.task_step import task_step
    from colossax.tasks import task_of

    count = 1
    for size in config.plan.mesh.values():
        count *= size
    task = task_of(config)
    step = task_step(task, config.plan, jax.devices()[:count])
    state = step.init(0)
    shape = task.shapes["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, config.model.vocab, (2, *shape))
    batch = {
        "tokens": tokens[0].astype(np.int32),
        "targets": tokens[1].astype(np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }

    def once() -> float:
        nonlocal state
        began = time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return time.process_time() - began

    once()
    return once


def in_turns(runs: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of each."""
    rows = [[run() for run in runs] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def sending(kind: str, group: int, kib: int) -> Callable[[], float]:
    """Each call gives CPU-seconds of one such collective of all devices.

    A device holds `kib` KiB: what it gives, and of `reduce-scatter` and `all-reduce` all of it.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    types = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((DEVICES // group, group), ("out", "in"), axis_types=types)
    ring = [(at, (at + 1) % group) for at in range(group)]
    send: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all-gather": lambda x: jax.lax.all_gather(x, "in", tiled=True)[: len(x)],
        "reduce-scatter": lambda x: jnp.concatenate(
            [jax.lax.psum_scatter(x, "in", tiled=True), x[: len(x) - len(x) // group]]
        ),
        "all-reduce": lambda x: jax.lax.psum(x, "in"),
        "all-to-all": lambda x: jax.lax.all_to_all(x, "in", 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, "in", ring),
    }

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: send[kind](x) * 0.5, x)

    spec = PartitionSpec(("out", "in"))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.ones((DEVICES * kib, 256)), NamedSharding(mesh, spec))
    run(x).block_until_ready()

    def once() -> float:
        began = time.process_time()
        run(x).block_until_ready()
        return (time.process_time() - began) / REPEATS

    return once


def ring_bytes(kind: str, group: int, held: float) -> float:
    """That a device sends in a ring: see `planner/searching/sends.py`."""
    share = (group - 1) / group
    each = {"all-gather": (group - 1), "all-reduce": 2 * share, "collective-permute": 1}
    return each.get(kind, share) * held


def links(rounds: int) -> dict[str, Any]:
    """Latency and rate of each kind of collective, by least squares over groups and sizes."""
    import numpy as np

    from colossax.aot.targets import Link, hops

    points = [(kind, n, kib) for kind in KINDS for n in (2, 4, 8) for kib in KIB]
    seconds = in_turns([sending(*point) for point in points], rounds)
    found = {}
    for kind in KINDS:
        rows, truth = [], []
        for (one, n, kib), took in zip(points, seconds, strict=True):
            if one == kind:
                steps = hops(kind, n)
                # Relative errors count, so that small messages are as good as large ones.
                rows.append([steps / took, ring_bytes(kind, n, 1024 * kib) / took])
                truth.append(1.0)
        latency, each = nonnegative(np.array(rows), np.array(truth))
        found[kind] = Link(name=kind, latency_s=latency, bytes_per_s=1 / max(each, 1e-15))
    return found


def nonnegative(matrix: Any, truth: Any) -> list[float]:
    """Least squares with nothing below zero."""
    from scipy.optimize import nnls

    scale = abs(matrix).max(axis=0)
    found, _ = nnls(matrix / scale, truth)
    return [float(one) for one in found / scale]


def rates(rounds: int) -> Any:
    """Measured on this machine, in CPU-seconds of all devices together."""
    import numpy as np

    from colossax.planner.searching.seconds import Rates

    kinds = links(rounds)
    # With one FLOP and one byte a second, terms are numbers of those.
    counted = Rates(
        matmuls=1.0,
        pairs=1.0,
        memory=1.0,
        node=kinds["all-gather"],
        network=kinds["all-gather"],
        kinds=kinds,
        hiding=0.0,
        slowing=0.0,
    )
    configs = [run_of(case, **sizes) for case, sizes in OTHERS]
    took = in_turns([stepper(config) for config in configs], rounds)
    rows, truth = [], []
    for config, seconds in zip(configs, took, strict=True):
        said = predicted(config, counted).seconds
        rows.append([said.compute, said.memory, config.plan.batch.accumulation])
        truth.append(seconds - said.waited - said.beside)
        rows[-1] = [one / truth[-1] for one in rows[-1]]
    flop, byte, microbatch = nonnegative(np.array(rows), np.ones(len(rows)))
    return dataclasses.replace(
        counted,
        matmuls=1 / max(flop, 1e-15),
        pairs=1 / max(flop, 1e-15),
        memory=1 / max(byte, 1e-15),
        microbatch_s=microbatch,
    )


def predicted(config: Any, given: Any) -> Any:
    """By formula, on eight devices that are one node."""
    from colossax.aot import parse_target
    from colossax.planner.profiling import profile_task
    from colossax.planner.searching import predict
    from colossax.tasks import task_of

    target = parse_target("h100:1x8")  # of which nothing counts but that there are eight
    return predict(profile_task(task_of(config), config.plan, target), config.plan, target, given)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: that of ranks; there are no ties among measured seconds."""
    import numpy as np

    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> int:
    """Measure rates and plans, compare, write, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "plan_order.json")
    args = parser.parse_args()
    from colossax.config import to_json

    given = rates(args.rounds)
    print(given, flush=True)
    configs = [run_of(case) for case in CASES]
    said = [predicted(config, given).seconds for config in configs]
    took = in_turns([stepper(config) for config in configs], args.rounds)
    found = rank_correlation(took, [one.total for one in said])
    rows = sorted(
        (seconds, one.total, one.compute, one.waited + one.beside, one.memory, case.name)
        for seconds, one, case in zip(took, said, CASES, strict=True)
    )
    header = ["measured", "predicted", "compute", "sent", "memory", "plan"]
    print(common.table(header, rows))
    print(f"rank correlation {found:.3f}, at least {BAR} is wanted")
    common.write_json(
        args.out,
        {
            "hardware": common.hardware(),
            "versions": common.versions(),
            "model": {**MODEL, "rows": ROWS, "seq": SEQ},
            "rates": to_json(given),
            "plans": [dict(zip(header, row, strict=True)) for row in rows],
            "rank_correlation": found,
        },
    )
    return int(found < BAR)


if __name__ == "__main__":
    sys.exit(main())
