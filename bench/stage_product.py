"""Every mesh of eight devices with stages, under every preset, against one device; counted.

    python bench/stage_product.py [--out FILE] [--only MESH] [--schedule 1f1b]

Meshes: every factorisation of eight with `stage` 2, 4 or 8 over data, fsdp, ring, ulysses and
tensor, and `row` x `col` in layout 2d at two stages. Of each the small Llama of the tests with
full recomputation, rows that its microbatches do not divide: loss and gradients, then losses and
gradient norms of three steps of AdamW. Float32 at the highest precision of matmuls, bars those of
the tests.
One process, on eight host devices; a call goes on where the last one stopped.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")  # fewer threads, and collectives side by side may wait forever
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)

import common  # noqa: E402 (after the settings above)

sys.path.insert(0, str(common.REPOSITORY))  # the cases are a part of the tests

MICROBATCHES, STEPS = 4, 3
ROWS = (10, 12)
"""No multiple of four for each device of two; the second where ten do not divide over a mesh."""
_CLEARED_EVERY = 8
"""Cases after which compiled programs are forgotten: they would fill the memory."""


def cases(schedule: str) -> dict[str, Any]:
    """Plans by name."""
    from colossax.config import preset
    from tests.step.stages import test_stages as stages

    found = {}
    sides = [{"stage": 2, "row": row, "col": 4 // row} for row in (1, 4)]
    for mesh in [*stages.meshes(), *sides]:
        layout = {"tensor_layout": "2d"} if "row" in mesh else {}
        for name in stages.PRESETS:
            how = stages.piped(MICROBATCHES, schedule=schedule)
            label = f"{stages.oracle.label(mesh)} {name}"
            found[label] = preset(name, mesh=mesh, segments=stages.FULL, **layout, **how)
    return found


def rows_of(plan: Any) -> int:
    """Of a batch."""
    split = plan.mesh.get("data", 1) * plan.mesh.get("fsdp", 1) * plan.mesh.get("row", 1)
    return next(rows for rows in ROWS if rows % split == 0)


class Truth:
    """What one device finds."""

    def __init__(self):
        from colossax.config import Plan

        self.first = {rows: self.gradients(Plan(), rows) for rows in ROWS}
        self.later = {rows: self.steps(Plan(), rows) for rows in ROWS}

    def gradients(self, plan: Any, rows: int) -> tuple[Any, float]:
        from tests.step.stages import test_stages as stages

        return stages.gradients("llama", plan, stages.devices_of(plan), rows)

    def steps(self, plan: Any, rows: int) -> list[tuple[float, float]]:
        """Loss and norm of each step, from the parameters that gradients were taken of."""
        import jax

        from colossax.optim import adamw
        from tests.step.stages import test_stages as stages

        step = stages.step_of("llama", plan, stages.devices_of(plan), adamw(1e-2))
        placed = jax.device_put(stages.start("llama"), step.shardings["params"])
        state, found = step.init_from(placed), []
        for _ in range(STEPS):
            state, metrics = step(state, stages.oracle.batch("llama", rows=rows))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found

    def against(self, plan: Any) -> None:
        """Raises where a plan's numbers are others."""
        from tests.oracle import assert_losses_close, assert_trees_close

        rows = rows_of(plan)
        (grads, loss), (want, right) = self.gradients(plan, rows), self.first[rows]
        assert_losses_close(loss, right)
        assert_trees_close(grads, want)
        assert_losses_close(self.steps(plan, rows), self.later[rows])


def verdict(truth: Truth, plan: Any) -> str | None:
    """None, or what was wrong; a refusal is wrong too."""
    try:
        truth.against(plan)
    except Exception as problem:  # noqa: BLE001 (any is a finding)
        return f"{type(problem).__name__}: {problem}"[:600]
    return None


def main() -> int:
    asked = _arguments()
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    result = _known(asked)
    plans = {k: v for k, v in cases(asked.schedule).items() if (asked.only or "") in k}
    left = [name for name in plans if name not in result["passed"] and name not in result["failed"]]
    print(f"{len(plans)} cases, {len(left)} to run", flush=True)
    truth = Truth()
    for at, name in enumerate(left):
        start = time.process_time()
        wrong = verdict(truth, plans[name])
        cpu_s = round(time.process_time() - start, 1)
        if wrong is None:
            result["passed"][name] = cpu_s
        else:
            result["failed"][name] = {"cpu_s": cpu_s, "why": wrong}
            print(f"{name}: {wrong}", flush=True)
        result["cpu_s"] = round(result["cpu_s"] + cpu_s, 1)
        common.write_json(asked.out, result)
        if at % _CLEARED_EVERY == _CLEARED_EVERY - 1:
            jax.clear_caches()
    passed, failed = len(result["passed"]), len(result["failed"])
    print(f"{passed} equal one device, {failed} do not; {result['cpu_s']:.0f} CPU-seconds")
    return int(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "stage_product.json")
    parser.add_argument("--only", help="of names that contain this")
    parser.add_argument("--schedule", default="1f1b")
    return parser.parse_args()


def _known(asked: argparse.Namespace) -> dict[str, Any]:
    """What earlier calls found, or nothing."""
    about = {
        "benchmark": "stage_product",
        "schedule": asked.schedule,
        "microbatches": MICROBATCHES,
        "rows": list(ROWS),
        "steps": STEPS,
        "versions": common.versions(),
        "hardware": common.hardware(),
    }
    known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if known and any(known.get(name) != value for name, value in about.items()):
        raise SystemExit(f"{asked.out} is of another call; move it away")
    return {"passed": {}, "failed": {}, "cpu_s": 0.0, **known, **about}


if __name__ == "__main__":
    sys.exit(main())
