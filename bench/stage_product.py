"""Every mesh of eight devices with stages, under every preset, against one device; counted.

    python bench/stage_product.py [--out FILE] [--only MESH] [--schedule 1f1b]

Meshes: every factorisation of eight with `stage` 2, 4 or 8 over data, fsdp, ring, ulysses and
tensor, and `row` x `col` in layout 2d at two stages. Of each the small Llama of the tests with
full recomputation, rows that its microbatches do not divide: loss and gradients, then losses and
gradient norms of three steps of AdamW. Float32 at the highest precision of matmuls, bars those of
the tests.
One process, on eight host devices; a call goes on where the last one stopped.
"""

import functools
import sys
from typing import Any

import products

MICROBATCHES, STEPS = 4, 3
ROWS = (10, 12)
"""No multiple of four for each device of two; the second where ten do not divide over a mesh."""


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


def main() -> int:
    parser = products.parser(__doc__ or "", "stage_product")
    parser.add_argument("--schedule", default="1f1b")
    asked = parser.parse_args()
    about = {
        "benchmark": "stage_product",
        "schedule": asked.schedule,
        "microbatches": MICROBATCHES,
        "rows": list(ROWS),
        "steps": STEPS,
    }
    truth = Truth()
    checks = {
        name: functools.partial(truth.against, plan) for name, plan in cases(asked.schedule).items()
    }
    return products.run(asked, about, checks)


if __name__ == "__main__":
    sys.exit(main())
