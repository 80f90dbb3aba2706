"""What a run would need on GPUs that are not there: bytes, collectives, time at the roofline."""

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from colossax.aot import (
    MemoryReport,
    Program,
    Target,
    checkpoint_stacks,
    collectives,
    memory_report,
    parse_module,
    totals,
)
from colossax.compat import cudnn_installed
from colossax.config import Plan, Precision
from colossax.pallas.attention.mosaic_gpu.forward import KERNEL_NAME
from colossax.planner.counting.compiled import (
    compiled_task,
    has_stage_programs,
    settle_task_for_target,
    usable_bytes,
)
from colossax.planner.counting.counted_stages import counted_stages
from colossax.planner.counting.experts_cost import ExpertsCost, experts_cost
from colossax.planner.counting.flops import all_peak_flops, matmul_seconds, peak_flops
from colossax.planner.counting.islands import check_programs_apart
from colossax.planner.counting.stage_cost import StageCost, stage_cost
from colossax.planner.counting.stage_programs import ProgramsCost
from colossax.planner.counting.traced_flops import TracedFlops, traced_flops
from colossax.planner.counting.traffic import RECOMPUTED, HostTraffic, Link, host_traffic, link_of
from colossax.sharding import batch_axes
from colossax.sharding.experts.exchange import PASSES, assumed_turns
from colossax.step.microbatches import batch_dims, num_microbatches
from colossax.step.offloaded.disk import DiskCost, DiskTier
from colossax.step.step import Step
from colossax.tasks import Task, TrainConfig, task_of

_KERNEL_CALL = "mosaic_gpu"
"""Part of the name of what calls a Mosaic kernel, in a compiled program."""

_ATTENTION_FILES = "/pallas/attention/"
"""Part of the names of files that a program with the library's attention was traced from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """One run on one target; bytes are per device and step.

    Attributes:
        name: Of what is trained.
        plan: As it would run.
        limit_bytes: The GPU's memory.
        fits: Whether the program needs at most that, but for `DEVICE_SHARE`.
        attention: `mosaic` or `cudnn` where the compiled program calls them, else `xla`; None where
            it has none of the library's.
        proof_assumed: Whether the program has Mosaic kernels that `auto` took: on the GPUs it will,
            once they have proved themselves there.
        flops_per_token: Of the model, forward and backward, per `counted`; recomputation is not
            counted. None where a task does not say.
        traced: FLOPs of the step as it was traced, where those of the model are not known.
        compute_s: Model FLOPs of a step at the GPUs' peak, or those traced where they are not
            known. In a plan with float8 only what the traced step multiplies in it counts at its
            peak, less what may be recomputed (`RECOMPUTED`) or fill a bubble.
        microbatch: Rows of each device at a time.
        microbatches: Per step.
        host_traffic: Copies between GPU and host; None where there are none.
        disk: What layers on disk take; None where there are none.
        cpu_layers: Layers that the CPU updates.
        pipeline: What the stages do; None where there is one. Where each has programs of its own,
            `memory` is that of the fullest, `links` are those of the stage that sends most.
        experts: What a mixture of experts has, holds and sends; None where there is none.
        one_pass_counted: Whether what is moved is that of one pass, of which a step may take two.
        searched: Whether the largest microbatch was.
        largest_microbatch: The most rows that fit; None where not searched, or not one does.
    """

    name: str
    plan: Plan
    target: Target
    parameters: int
    program: Program
    memory: MemoryReport
    links: tuple[Link, ...]
    limit_bytes: int
    fits: bool
    attention: str | None
    flops_per_token: int | None
    compute_s: float | None
    microbatch: int
    microbatches: int
    traced: TracedFlops | None = None
    proof_assumed: bool = False
    host_traffic: HostTraffic | None = None
    disk: DiskCost | None = None
    cpu_layers: int = 0
    pipeline: StageCost | ProgramsCost | None = None
    experts: ExpertsCost | None = None
    one_pass_counted: bool = False
    searched: bool = False
    largest_microbatch: int | None = None
    counted: str = "tokens"

    def with_largest(self, rows: int | None) -> "Inspection":
        """The same with the result of `largest_microbatch`."""
        return dataclasses.replace(self, searched=True, largest_microbatch=rows)

    @property
    def note(self) -> str:
        """What is not as on the GPUs, or not in every step; or empty."""
        notes = []
        if self.one_pass_counted:
            notes.append(
                "copies and collectives are those of a step that need not scale its gradients; one"
                " that does runs forward and backward once more (plan.offload.clipping speculate)"
            )
        searched = self.plan.attention.kernel == "auto" and self.attention == "xla"
        if searched and not cudnn_installed():
            notes.append(
                "attention is XLA's; on the GPUs 'auto' may take cuDNN's, which is not installed"
                " here (pip install 'colossax[cudnn]')"
            )
        return "; ".join(notes)

    @property
    def collective_s(self) -> float:
        """Predicted seconds of all collectives."""
        return sum((link.seconds for link in self.links), 0.0)

    @property
    def exposed_s(self) -> float:
        """Of those, seconds of collectives beside which nothing is computed."""
        return sum((link.exposed_s for link in self.links), 0.0)

    @property
    def bubble(self) -> float | None:
        """Of all stages' time, the share that their pipeline does not use; None without stages."""
        return None if self.pipeline is None else self.pipeline.report.bubble

    @property
    def copied_s(self) -> float:
        """Predicted seconds of what stages with programs of their own send, on the slowest edge."""
        edges = self.pipeline.edges if isinstance(self.pipeline, ProgramsCost) else ()
        return max((edge.seconds for edge in edges), default=0.0)

    @property
    def roofline_s(self) -> float:
        """Seconds of a step at the GPUs' peak, to compare plans by.

        Of stages, compute fills what the bubble leaves. Copies between stages are beside compute:
        what waits for them is in the bubble.
        """
        used = 1 - (self.bubble or 0.0)
        computing = (self.compute_s or 0.0) / used if used > 0 else 0.0
        return max(computing, self.collective_s - self.exposed_s, self.copied_s) + self.exposed_s

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON types."""
        memory = self.memory
        return {
            "recipe": self.name,
            "target": self.target.name,
            "plan": self.plan.hash,
            "fits": self.fits,
            "limit_bytes": self.limit_bytes,
            "device_bytes": {
                "total": memory.total_bytes,
                "argument": memory.argument_bytes,
                "temp": memory.temp_bytes,
                "terms": dict(memory.terms),
            },
            "host_bytes": memory.host_bytes,
            **({"host_traffic": self.host_traffic.to_json()} if self.host_traffic else {}),
            **({"disk": dataclasses.asdict(self.disk)} if self.disk else {}),
            **({"cpu_layers": self.cpu_layers} if self.cpu_layers else {}),
            **(self.pipeline.to_json(memory.total_bytes) if self.pipeline else {}),
            **(self.experts.to_json() if self.experts else {}),
            "largest": [
                {
                    "bytes": b.bytes,
                    "shape": b.shape,
                    "term": b.term,
                    "op": b.op_name,
                    "at": b.source,
                }
                for b in memory.largest
            ],
            "collectives": [
                {
                    "axis": link.totals.axis,
                    "kind": link.totals.kind,
                    "count": link.totals.count,
                    "bytes": link.totals.bytes,
                    "ring_bytes": link.totals.ring_bytes,
                    "overlapped": link.totals.overlapped,
                    "link": link.link,
                    "seconds": link.seconds,
                    "exposed_s": link.exposed_s,
                }
                for link in self.links
            ],
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            **({"traced_flops": dataclasses.asdict(self.traced)} if self.traced else {}),
            "compute_s": self.compute_s,
            "microbatch": self.microbatch,
            "microbatches": self.microbatches,
            "largest_microbatch": self.largest_microbatch,
            "attention": self.attention,
            "kernel_proof": "assumed" if self.proof_assumed else None,
            "note": self.note,
            "compile_s": self.program.compile_s,
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "jaxlib": jaxlib.__version__,
            },
        }


def inspect_run(config: TrainConfig, target: Target) -> Inspection:
    """Compile a run's step for a target and count; see `inspect_task`."""
    return inspect_task(task_of(config), config.plan, target)


def inspect_task(task: Task, plan: Plan, target: Target) -> Inspection:
    """Compile the step of a task for a target and count.

    What the plan leaves open is settled for the target first. FLOPs of the model are what the task
    says; where it says none, those of the traced step are counted.

    Raises:
        InputError: The task does not fit its plan, or does not say what its batches are; or the
            CUDA compiler plugin is missing.
    """
    plan = settle_task_for_target(task, plan, target).plan
    check_programs_apart(plan, target)
    of = _of_stages if has_stage_programs(plan, target) else _of_one_program
    step, counted = of(task, plan, target)
    traced = counted.pop("traced")
    flops_per_token = task.flops // task.tokens if task.flops and task.tokens else None
    microbatch, microbatches = _microbatch(step, task)
    hlo = counted["program"].hlo
    return Inspection(
        name=task.name,
        plan=plan,
        target=target,
        parameters=step.spec.parameter_count(),
        attention=_attention_in(hlo),
        proof_assumed=plan.attention.kernel == "auto" and _KERNEL_CALL in hlo,
        flops_per_token=flops_per_token,
        counted=task.counted,
        compute_s=_compute_s(task.flops, plan.precision, target, traced, counted["pipeline"]),
        traced=None if task.flops else traced,
        microbatch=microbatch,
        microbatches=microbatches,
        experts=_experts(step, task, flops_per_token, counted.pop("assumed_loops")),
        **counted,
    )


def _of_one_program(task: Task, plan: Plan, target: Target) -> tuple[Step, dict[str, Any]]:
    """A step that is one program, and what is counted of that."""
    step, program, jaxpr = compiled_task(task, plan, target)
    turns = assumed_turns(step.bound.plan.experts.chunks)
    module, assumed_loops = parse_module(program.hlo).assuming(PASSES, turns)
    once = step.streaming is not None and step.streaming.clipping == "speculate"
    if once:
        module = module.with_trip_count(1)
    flops_per_token = task.flops // task.tokens if task.flops and task.tokens else None
    peak = peak_flops(target.gpu.name, plan.precision.multiplies_in)
    sums = totals(collectives(module, step.bound.mesh))
    return step, {
        "program": program,
        "memory": memory_report(program, names=checkpoint_stacks(jaxpr)),
        "limit_bytes": target.gpu.memory_bytes,
        "links": tuple(link_of(t, target, step.bound.mesh) for t in sums),
        "fits": program.device_bytes <= usable_bytes(target),
        "traced": traced_flops(jaxpr),
        "host_traffic": host_traffic(module, target, flops_per_token=flops_per_token, peak=peak),
        "disk": _disk_cost(step),
        "cpu_layers": _cpu_layers(step),
        "pipeline": stage_cost(step, _microbatch(step, task)[1]),
        "one_pass_counted": once,
        "assumed_loops": assumed_loops,
    }


def _of_stages(task: Task, plan: Plan, target: Target) -> tuple[Step, dict[str, Any]]:
    """A step whose stages have programs of their own: bytes of the fullest stage, collectives of
    that which sends most."""
    step, cost = counted_stages(task, plan, target)
    return step, {
        "program": cost.program,
        "memory": cost.fullest.memory,
        "limit_bytes": cost.fullest.target.gpu.memory_bytes,
        "links": max((one.links for one in cost.stages), key=_ring_bytes),
        "fits": cost.fits,
        "traced": cost.flops,
        "pipeline": cost,
        "assumed_loops": cost.assumed_loops,
    }


def _experts(
    step: Step, task: Task, flops_per_token: int | None, assumed_loops: int
) -> ExpertsCost | None:
    """Of a model whose batch has a dim of tokens."""
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    lengths = [
        shape.shape[dims[name].index("seq")]
        for name, shape in task.shapes.items()
        if "seq" in dims[name]
    ]
    if not lengths:
        return None
    rows, count = _microbatch(step, task)
    rows *= step.bound.size(sorted(batch_axes(step.bound)))
    found = experts_cost(step, (rows, lengths[0]), count, flops_per_token)
    return None if found is None else dataclasses.replace(found, assumed_loops=assumed_loops)


def _compute_s(
    flops: int | None,
    precision: Precision,
    target: Target,
    traced: TracedFlops,
    pipeline: StageCost | ProgramsCost | None,
) -> float | None:
    """See `Inspection.compute_s`; None where the GPUs' peak is not known."""
    dtypes = (precision.compute, precision.multiplies_in)
    peaks = [peak for dtype in dtypes if (peak := all_peak_flops(target, dtype)) is not None]
    if len(peaks) < len(dtypes):
        return None
    if not flops:
        return matmul_seconds(traced.flops, traced.float8_flops, peaks)
    # One program of all stages computes in its bubbles too; programs of stages do not.
    used = 1 - (pipeline.report.bubble if isinstance(pipeline, StageCost) else 0.0)
    float8 = min(used * traced.float8_flops / RECOMPUTED, flops)
    return matmul_seconds(flops, float8, peaks)


def _ring_bytes(links: tuple[Link, ...]) -> int:
    return sum(link.totals.ring_bytes for link in links)


def _rows(task: Task) -> int:
    """Of a global batch, those of its first array."""
    dims = batch_dims(dict(task.shapes), task.options.batch_dims)
    name, first = next(iter(task.shapes.items()))
    return first.shape[dims[name].index("batch")]


def _disk_cost(step: Step) -> DiskCost | None:
    if step.streaming is None or not step.streaming.on_disk:
        return None
    return DiskTier(step.streaming, step.abstract, Path()).cost()


def _cpu_layers(step: Step) -> int:
    parts = {} if step.streaming is None else step.streaming.on_cpu
    return sum(part.count for part in parts.values())


def _attention_in(hlo: str) -> str | None:
    """Which implementation of the library's attention a program has; None where it has none."""
    if any(KERNEL_NAME in line for line in hlo.splitlines() if _KERNEL_CALL in line):
        return "mosaic"
    if "__cudnn$fmha" in hlo:
        return "cudnn"
    return "xla" if _ATTENTION_FILES in hlo else None


def _microbatch(step: Step, task: Task) -> tuple[int, int]:
    """Rows of each device at a time, and how many times."""
    rows, shapes = _rows(task), dict(task.shapes)
    devices = step.bound.size(sorted(batch_axes(step.bound)))
    count = num_microbatches(step.bound, shapes, batch_dims(shapes, step.options.batch_dims))
    # Of a pipeline, the last ones are filled up.
    return -(-rows // (count * devices)), count


def compare(inspected: Mapping[str, Inspection]) -> list[str]:
    """Names of the inspections from the cheapest to the dearest; those that fit come first."""

    def cost(name: str) -> tuple[bool, float]:
        one = inspected[name]
        return not one.fits, one.roofline_s

    return sorted(inspected, key=cost)
