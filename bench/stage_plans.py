"""When stages pay: plans with and without them on the same GPUs, by bytes and predicted seconds.

    python bench/stage_plans.py [--out FILE] [--only TEXT] [--again]

Llama 3 8B and 70B, rows of 8192, full recomputation, bfloat16, each plan's step compiled for H100s
that are not there. A call compiles what the file does not have yet, in one process; refused plans,
with the sentence, are tried again. Needs the extra `aot`; no GPU.

Seconds are predicted, not measured, for each network between nodes:

    max(compute, collectives beside compute) + collectives beside none
    compute = 4/3 x model FLOPs x passes a stage runs / microbatches / (GPUs x peak x 0.4)

4/3 for recomputation, 0.4 of the peak as `colossax inspect` assumes; passes over microbatches is
the price of a bubble. Collectives take their bytes at the link's rate, one after another, and all
of them the latencies of a ring, also what is handed to a neighbour, of which `inspect` has one. It
compares plans; no run was timed.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.REPOSITORY))

NETWORKS = ("ib", "roce", "ethernet")
GIB, GB = 2**30, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A plan on a target with a global batch; `rows` of each device at a time."""

    model: str
    target: str
    batch: int
    mesh: Mapping[str, int]
    preset: str = "zero3+megatron_sp"
    rows: int = 1
    chunks: int = 1
    gather: str = "microbatch"

    @property
    def plan(self) -> str:
        """For people."""
        words = [f"{axis}={size}" for axis, size in self.mesh.items()]
        words += [self.preset] * ("zero3" not in self.preset)
        words += [f"{self.rows} rows at a time"] * (self.rows > 1)
        words += [f"{self.chunks} chunks"] * (self.chunks > 1)
        return ", ".join(words + ["gathered once"] * (self.gather == "step"))

    @property
    def name(self) -> str:
        return f"{self.model} {self.target} batch {self.batch}: {self.plan}"

    def config(self) -> Any:
        """The run."""
        from colossax.config import (
            BatchConfig,
            LossConfig,
            PipelineConfig,
            Precision,
            Segment,
            preset,
        )

        base = self.base()
        plan = preset(
            self.preset,
            mesh=dict(self.mesh),
            segments=(Segment(remat="full"),),
            precision=Precision(compute="bfloat16"),
            loss=LossConfig(vocab_chunks=8),
            batch=BatchConfig(microbatch=self.rows),
            pipeline=PipelineConfig(chunks=self.chunks, gather=self.gather),
        )
        return base.replace(plan=plan, data=dataclasses.replace(base.data, global_batch=self.batch))

    def base(self) -> Any:
        """Model and rows."""
        from colossax.recipes import recipe

        return recipe(self.model)


def cases() -> list[Case]:
    """The plans to compare: of a larger batch, those without stages take more rows at a time."""
    found = []
    for batch, rows in ((64, 1), (512, 4)):
        seventy = {"model": "llama3_70b", "target": "h100:8x8", "batch": batch}
        found += [
            Case(**seventy, mesh={"fsdp": 64}, rows=rows),
            Case(**seventy, mesh={"fsdp": 8, "tensor": 8}, rows=rows),
            Case(**seventy, mesh={"stage": 8, "fsdp": 8}),
        ]
    found.append(Case(**seventy, mesh={"stage": 8, "tensor": 8}))
    for batch, rows in ((16, 2), (64, 4)):
        halves = {"model": "llama3_8b", "target": "h100:2x4", "batch": batch}
        found += [
            Case(**halves, mesh={"fsdp": 8}, rows=rows),
            Case(**halves, mesh={"data": 2, "fsdp": 4}, rows=rows),
            Case(**halves, mesh={"stage": 2, "fsdp": 4}),
            Case(**halves, mesh={"stage": 2, "fsdp": 4}, gather="step"),
            Case(**halves, mesh={"stage": 2, "fsdp": 4}, preset="zero1"),
        ]
    for batch, rows in ((64, 1), (512, 4)):
        eight = {"model": "llama3_8b", "target": "h100:8x8", "batch": batch}
        found += [
            Case(**eight, mesh={"data": 8, "fsdp": 8}, rows=rows),
            Case(**eight, mesh={"stage": 8, "fsdp": 8}),
        ]
    node = {"model": "llama3_8b", "target": "h100:1x8", "batch": 64}
    found += [
        Case(**node, mesh={"fsdp": 8}, rows=4),
        Case(**node, mesh={"stage": 4, "fsdp": 2}),
        Case(**node, mesh={"stage": 4, "fsdp": 2}, preset="zero1"),
    ]
    return found


def counted(case: Case) -> dict[str, Any]:
    """What a plan needs and is predicted to take; or why it was refused."""
    from colossax.aot import parse_target
    from colossax.errors import InputError
    from colossax.planner import inspect_run

    about = {**dataclasses.asdict(case), "plan": case.plan}
    try:
        one = inspect_run(case.config(), parse_target(case.target))
    except InputError as problem:
        return {**about, "refused": str(problem)}
    executed = _executed(one)
    return {
        **about,
        "fits": one.fits,
        "device_gib": one.memory.total_bytes / GIB,
        "argument_gib": one.memory.argument_bytes / GIB,
        "microbatches": one.microbatches,
        "bubble": 1 - 1 / executed,
        "saved": max(one.pipeline.report.saved) if one.pipeline else None,
        "compute_s": _compute_s(one) * executed,
        "sent_gb": sent(one),
        "network_gb": sum(link.totals.ring_bytes for link in one.links if link.link in NETWORKS)
        / GB,
        "seconds": {network: seconds(one, network) for network in NETWORKS},
        "compile_s": one.program.compile_s,
    }


def _executed(one: Any) -> float:
    """Forward passes that a device runs over those that its microbatches need."""
    if one.pipeline is None:
        return 1.0
    table = one.pipeline.table
    found = one.pipeline.to_json(0)["pipeline"]["executed"]
    return found["forward"] / (table.microbatches * table.chunks)


def _compute_s(one: Any) -> float:
    from colossax.planner.counting.traffic import ASSUMED_EFFICIENCY, RECOMPUTED

    return RECOMPUTED * one.compute_s / ASSUMED_EFFICIENCY


def sent(one: Any) -> dict[str, float]:
    """GB in rings per device and step, by axis."""
    found: dict[str, float] = {}
    for link in one.links:
        axis = link.totals.axis
        found[axis] = found.get(axis, 0.0) + link.totals.ring_bytes / GB
    return {axis: gb for axis, gb in found.items() if gb >= 0.01}


def seconds(one: Any, network: str) -> float:
    """Predicted for a step with this network between nodes; see the formula above."""
    from colossax.aot import parse_target

    target = parse_target(one.target.name, network=network)
    hidden = exposed = 0.0
    for link in one.links:
        sums = link.totals
        over = target.network if link.link in NETWORKS else target.gpu.nvlink
        whole = target.ring_seconds(sums.ring_bytes, sums.group_size, sums.count, over)
        bare = target.ring_seconds(
            sums.exposed_ring_bytes, sums.group_size, sums.exposed_count, over
        )
        hidden, exposed = hidden + whole - bare, exposed + bare
    return max(_compute_s(one) * _executed(one), hidden) + exposed


def run(asked: argparse.Namespace, benchmark: str, plans: list[Case]) -> None:
    """Compile what is not in the file yet, writing after each."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else {}
    for case in plans:
        known = case.name in rows and "refused" not in rows[case.name] and not asked.again
        if known or (asked.only or "") not in case.name:
            continue
        rows[case.name] = counted(case)
        jax.clear_caches()
        about = {"benchmark": benchmark, "versions": common.versions(), "networks": NETWORKS}
        common.write_json(asked.out, {**about, "rows": rows})
        print(case.name, "refused" if "refused" in rows[case.name] else "", flush=True)
    print(markdown(rows[case.name] for case in plans if case.name in rows))


HEAD = ("plan", "microbatches", "GiB", "bubble", "between nodes", "ib", "ethernet")


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """A table of each model, target and batch, as the pages have them; refused plans are left out.

    GiB of each device; GB that it sends between nodes in a step; predicted seconds by network.
    """
    groups: dict[str, list[str]] = {}
    for row in rows:
        if "refused" not in row:
            name = f"{row['model']}, {row['target']}, batch {row['batch']}"
            groups.setdefault(name, []).append(_line(row))
    top = f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}"
    return "\n\n".join(f"{name}:\n\n{top}\n" + "\n".join(some) for name, some in groups.items())


def _line(row: dict[str, Any]) -> str:
    seconds = [f"{_short(row['seconds'][network])} s" for network in ("ib", "ethernet")]
    cells = [
        f"`{row['plan']}`",
        str(row["microbatches"]),
        f"{row['device_gib']:.1f}" + ", too many" * (not row["fits"]),
        f"{100 * row['bubble']:.0f} %" if row["saved"] else "",
        f"{_short(row['network_gb'])} GB",
        *seconds,
    ]
    return f"| {' | '.join(cells)} |"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def arguments(about: str | None, name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / f"{name}.json")
    parser.add_argument("--only", help="of names that contain this")
    parser.add_argument("--again", action="store_true", help="also what the file has")
    return parser.parse_args()


if __name__ == "__main__":
    run(arguments(__doc__, "stage_plans"), "stage_plans", cases())
