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
    collectives,
    memory_report,
    parse_module,
    totals,
)
from colossax.compat import cudnn_installed
from colossax.pallas.attention.mosaic_gpu.forward import KERNEL_NAME
from colossax.planner.compiled import compiled_step, settle_for_target, usable_bytes
from colossax.planner.flops import peak_flops
from colossax.planner.traffic import HostTraffic, Link, host_traffic, link_of
from colossax.sharding import batch_axes
from colossax.step.offloaded.disk import DiskCost, DiskTier
from colossax.step.step import Step
from colossax.tasks import TrainConfig

_KERNEL_CALL = "mosaic_gpu"
"""Part of the name of what calls a Mosaic kernel, in a compiled program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """One run on one target; bytes are per device and step.

    Attributes:
        limit_bytes: The GPU's memory.
        fits: Whether the program needs at most that, but for `DEVICE_SHARE`.
        attention: `cudnn` where the compiled program calls it, else `xla`.
        proof_assumed: Whether the program has Mosaic kernels that `auto` took: on the GPUs it will,
            once they have proved themselves there.
        flops_per_token: Of the model, forward and backward; recomputation is not counted.
        compute_s: Model FLOPs of a step at the GPUs' peak.
        microbatch: Rows of each device at a time.
        microbatches: Per step.
        host_traffic: Copies between GPU and host; None where there are none.
        disk: What layers on disk take; None where there are none.
        cpu_layers: Layers that the CPU updates.
        one_pass_counted: Whether what is moved is that of one pass, of which a step may take two.
        searched: Whether the largest microbatch was.
        largest_microbatch: The most rows that fit; None where not searched, or not one does.
    """

    config: TrainConfig
    target: Target
    plan_hash: str
    parameters: int
    program: Program
    memory: MemoryReport
    links: tuple[Link, ...]
    limit_bytes: int
    fits: bool
    attention: str
    flops_per_token: int
    compute_s: float | None
    microbatch: int
    microbatches: int
    proof_assumed: bool = False
    host_traffic: HostTraffic | None = None
    disk: DiskCost | None = None
    cpu_layers: int = 0
    one_pass_counted: bool = False
    searched: bool = False
    largest_microbatch: int | None = None

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
        searched = self.config.plan.attention.kernel == "auto" and self.attention == "xla"
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

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON types."""
        memory = self.memory
        return {
            "recipe": self.config.recipe,
            "target": self.target.name,
            "plan": self.plan_hash,
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
    """Compile a run's step for a target and count.

    What the plan leaves open is settled for the target first.

    Raises:
        InputError: The run does not fit its plan, or the CUDA compiler plugin is missing.
    """
    config, _ = settle_for_target(config, target)
    step, program, names = compiled_step(config, target)
    mesh = step.bound.mesh
    memory = memory_report(program, names=names)
    decoder = config.model.decoder()
    seq_len = config.data.seq_len
    flops = decoder.train_flops_per_token(seq_len)
    rows = config.data.global_batch
    peak = peak_flops(target.gpu.name, str(config.plan.precision.compute))
    microbatch, microbatches = _microbatch(step, rows)
    module = parse_module(program.hlo)
    once = step.streaming is not None and step.streaming.clipping == "speculate"
    if once:
        module = module.with_trip_count(1)
    return Inspection(
        config=config,
        target=target,
        plan_hash=config.plan.hash,
        parameters=step.spec.parameter_count(),
        program=program,
        memory=memory,
        links=tuple(link_of(t, target, step) for t in totals(collectives(module, mesh))),
        limit_bytes=target.gpu.memory_bytes,
        fits=program.device_bytes <= usable_bytes(target),
        attention=_attention_in(program.hlo),
        proof_assumed=config.plan.attention.kernel == "auto" and _KERNEL_CALL in program.hlo,
        flops_per_token=flops,
        compute_s=None if peak is None else flops * rows * seq_len / (peak * target.size),
        microbatch=microbatch,
        microbatches=microbatches,
        host_traffic=host_traffic(module, target, flops_per_token=flops, peak=peak),
        disk=_disk_cost(step),
        cpu_layers=_cpu_layers(step),
        one_pass_counted=once,
    )


def _disk_cost(step: Step) -> DiskCost | None:
    if step.streaming is None or not step.streaming.on_disk:
        return None
    return DiskTier(step.streaming, step.abstract, Path()).cost()


def _cpu_layers(step: Step) -> int:
    parts = {} if step.streaming is None else step.streaming.on_cpu
    return sum(part.count for part in parts.values())


def _attention_in(hlo: str) -> str:
    """Which implementation of attention a program has."""
    if any(KERNEL_NAME in line for line in hlo.splitlines() if _KERNEL_CALL in line):
        return "mosaic"
    return "cudnn" if "__cudnn$fmha" in hlo else "xla"


def _microbatch(step: Step, rows: int) -> tuple[int, int]:
    """Rows of each device at a time, and how many times."""
    devices = step.bound.size(sorted(batch_axes(step.bound)))
    batch = step.bound.plan.batch
    if batch.microbatch is not None:
        return batch.microbatch, rows // (batch.microbatch * devices)
    return rows // (batch.accumulation * devices), batch.accumulation


def compare(inspected: Mapping[str, Inspection]) -> list[str]:
    """Names of the inspections from the cheapest to the dearest; those that fit come first."""

    def cost(name: str) -> tuple[bool, float]:
        one = inspected[name]
        return (
            not one.fits,
            max(one.compute_s or 0.0, one.collective_s - one.exposed_s) + one.exposed_s,
        )

    return sorted(inspected, key=cost)
