"""What a run would need on GPUs that are not there: bytes, collectives, time at the roofline."""

import dataclasses
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from colossax.aot import (
    MemoryReport,
    Module,
    Program,
    Target,
    Totals,
    TransferTotals,
    checkpoint_stacks,
    collectives,
    compile_program,
    memory_report,
    parse_module,
    target_devices,
    totals,
    transfer_totals,
    transfers,
)
from colossax.compat import cudnn_installed
from colossax.config import BatchConfig, Plan
from colossax.errors import InputError
from colossax.pallas.attention.mosaic_gpu.forward import KERNEL_NAME
from colossax.pallas.target import target as pallas_target
from colossax.sharding import batch_axes, compiler_options
from colossax.train.config import TrainConfig
from colossax.train.disk import DiskCost, DiskTier
from colossax.train.fitting import Fitted
from colossax.train.flops import peak_flops
from colossax.train.run import batch_shapes, fit_run, run_step
from colossax.train.step import Step

RESERVE = 0.03
"""Share of a GPU's memory left free: for workspaces that tuning on the GPU will choose, the CUDA
context and fragmentation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Collectives of one kind along the same axes, with what they would take.

    Attributes:
        totals: Counts and bytes per device and step.
        link: Kind of connection that the slowest hop crosses.
        seconds: In rings at that link's rate.
        exposed_s: Of those, of collectives beside which nothing is computed.
    """

    totals: Totals
    link: str
    seconds: float
    exposed_s: float


ASSUMED_EFFICIENCY = 0.4
"""Share of the GPUs' peak that steps are taken to reach, recomputation counted as work, where
nothing was measured."""

RECOMPUTED = 4 / 3
"""FLOPs that run per FLOP of the model when every layer's forward pass is run twice."""

_KERNEL_CALL = "mosaic_gpu"
"""Part of the name of what calls a Mosaic kernel, in a compiled program."""

HIDING_FORMULA = (
    "tokens = GPUs x seconds of the slower direction x peak x efficiency / (4/3 x FLOPs/token);"
    f" 4/3 for recomputation, efficiency {ASSUMED_EFFICIENCY} assumed, bytes as in this step"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """What a step copies between a GPU and its host; bytes and executions per device and step.

    Attributes:
        totals: By direction.
        up_bytes: To the device.
        down_bytes: To the host.
        sync_in_loops: Executions that stop a loop until they are done.
        up_s: At the target's PCIe rate, which both directions have at the same time.
        down_s: Likewise.
        hiding_tokens: Tokens of all devices per step whose compute takes as long as the slower
            direction, by `HIDING_FORMULA`; None where the GPU's peak is not known.
    """

    totals: tuple[TransferTotals, ...]
    up_bytes: int
    down_bytes: int
    sync_in_loops: int
    up_s: float
    down_s: float
    hiding_tokens: float | None

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON types."""
        return {
            "to_device_bytes": self.up_bytes,
            "to_host_bytes": self.down_bytes,
            "to_device_s": self.up_s,
            "to_host_s": self.down_s,
            "sync_in_loops": self.sync_in_loops,
            "hiding_tokens": self.hiding_tokens,
            "hiding_formula": HIDING_FORMULA,
            "by_direction": [dataclasses.asdict(one) for one in self.totals],
        }


def host_traffic(
    hlo: str | Module, target: Target, *, flops_per_token: int, peak: float | None
) -> HostTraffic | None:
    """Transfers of a compiled step, and what would hide them; None where it has none.

    Args:
        hlo: The program.
        target: What it was compiled for.
        flops_per_token: Of the model, forward and backward, without recomputation.
        peak: FLOP/s of one GPU.

    Raises:
        ValueError: A loop with transfers whose trip count is not known.
    """
    sums = transfer_totals(transfers(hlo))
    if not sums:
        return None
    moved = {one.direction: one.bytes for one in sums}
    up, down = moved.get("to_device", 0), moved.get("to_host", 0)
    rate = target.gpu.pcie_bytes_per_s
    work = RECOMPUTED * flops_per_token
    done = None if peak is None else target.size * peak * ASSUMED_EFFICIENCY
    return HostTraffic(
        totals=sums,
        up_bytes=up,
        down_bytes=down,
        sync_in_loops=sum(one.sync_in_loops for one in sums),
        up_s=up / rate,
        down_s=down / rate,
        hiding_tokens=None if done is None else max(up, down) / rate * done / work,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """One run on one target; bytes are per device and step.

    Attributes:
        limit_bytes: The GPU's memory.
        fits: Whether the program needs at most that, less `RESERVE`.
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


def fit_to_target(config: TrainConfig, target: Target) -> tuple[TrainConfig, Fitted | None]:
    """The run with shares in place of `plan.offload.auto`, found for a target; see `fit_run`.

    Raises:
        InputError: A budget does not do, or the CUDA compiler plugin is missing.
    """
    if not config.plan.offload.auto:
        return config, None
    _check_cudnn(config.plan, target)
    return fit_run(config, target_devices(target), target=target)


def inspect_run(config: TrainConfig, target: Target) -> Inspection:
    """Compile a run's step for a target and count.

    A plan that leaves its offload to `auto` is fitted first.

    Raises:
        InputError: The run does not fit its plan, or the CUDA compiler plugin is missing.
    """
    config, _ = fit_to_target(config, target)
    step, program, names = compiled_step(config, target)
    mesh = step.bound.mesh
    memory = memory_report(program, names=names)
    decoder = config.model.decoder()
    seq_len = config.data.seq_len
    flops = decoder.train_flops_per_token(seq_len)
    rows = config.data.global_batch
    peak = peak_flops(target.gpu.name, str(config.plan.precision.compute))
    microbatch, pieces = _microbatch(step, rows)
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
        fits=program.device_bytes <= _usable(target),
        attention=_attention_in(program.hlo),
        proof_assumed=config.plan.attention.kernel == "auto" and _KERNEL_CALL in program.hlo,
        flops_per_token=flops,
        compute_s=None if peak is None else flops * rows * seq_len / (peak * target.size),
        microbatch=microbatch,
        microbatches=pieces,
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


def largest_microbatch(
    config: TrainConfig, target: Target, tell: Callable[[str], None] = lambda _: None
) -> int | None:
    """The most rows of each device at a time that fit, by compiling; None when not even one does.

    Doubles until it does not fit, then halves the interval; a global batch of twice as many rows
    per device is compiled, so that gradients are accumulated as they would be.

    Args:
        config: The run; its global batch is replaced.
        target: Where.
        tell: Called with a line after each compilation.
    """

    def fits(rows: int) -> bool:
        with_rows = _with_microbatch(config, target, rows)
        found = compiled_step(with_rows, target)[1].device_bytes
        verdict = "fits" if found <= _usable(target) else "does not fit"
        tell(f"{rows} rows per device: {found / 2**30:.1f} GiB, {verdict}")
        return found <= _usable(target)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low or None


def _with_microbatch(config: TrainConfig, target: Target, rows: int) -> TrainConfig:
    batch = BatchConfig(microbatch=rows, reduce_once=config.plan.batch.reduce_once)
    plan = config.plan.replace(batch=batch)
    # Along the batch there are at most as many devices as in all; twice as many make two pieces.
    bound = plan.bind(target_devices(target))
    devices = bound.size(sorted(batch_axes(bound)))
    data = dataclasses.replace(config.data, global_batch=2 * rows * devices)
    return config.replace(plan=plan, data=data)


def compiled_step(config: TrainConfig, target: Target) -> tuple[Step, Program, Any]:
    """A run's step, the program compiled for a target, and the names of what it saves."""
    devices = target_devices(target)
    _check_cudnn(config.plan, target)
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        step = run_step(config, devices)
        batch = step.abstract_batch(batch_shapes(config))
        traced = step.jitted.trace(step.abstract, batch)
        lowered = traced.lower()
    program = compile_program(lowered, options=compiler_options(step.bound))
    return step, program, checkpoint_stacks(traced.jaxpr)


def _check_cudnn(plan: Plan, target: Target) -> None:
    """Refuse a plan that asks for cuDNN where it is not installed; `auto` does without.

    Raises:
        InputError: It does.
    """
    if plan.attention.kernel == "cudnn" and not cudnn_installed():
        raise InputError(
            f"plan.attention.kernel 'cudnn' on '{target.name}': cuDNN is not installed here;"
            f" run: pip install 'colossax[cudnn]', or give --plan.attention.kernel xla"
        )


def _attention_in(hlo: str) -> str:
    """Which implementation of attention a program has."""
    if any(KERNEL_NAME in line for line in hlo.splitlines() if _KERNEL_CALL in line):
        return "mosaic"
    return "cudnn" if "__cudnn$fmha" in hlo else "xla"


def _usable(target: Target) -> float:
    return target.gpu.memory_bytes * (1 - RESERVE)


def _microbatch(step: Step, rows: int) -> tuple[int, int]:
    """Rows of each device at a time, and how many times."""
    devices = step.bound.size(sorted(batch_axes(step.bound)))
    batch = step.bound.plan.batch
    if batch.microbatch is not None:
        return batch.microbatch, rows // (batch.microbatch * devices)
    return rows // (batch.accumulation * devices), batch.accumulation


def link_of(sums: Totals, target: Target, step: Step) -> Link:
    """Collectives with the link that they cross and what they take on it."""
    mesh = step.bound.mesh
    axes = sums.axis.split(" x ")
    known = [axis for axis in axes if axis in mesh.axis_names]
    link = target.link(mesh, known) if len(known) == len(axes) else target.network

    def seconds(ring_bytes: int, count: int) -> float:
        return target.ring_seconds(float(ring_bytes), sums.group_size, count, link)

    return Link(
        totals=sums,
        link=link.name,
        seconds=seconds(sums.ring_bytes, sums.count),
        exposed_s=seconds(sums.exposed_ring_bytes, sums.exposed_count),
    )


def compare(found: Mapping[str, Inspection]) -> list[str]:
    """Names of the inspections from the cheapest to the dearest; those that fit come first."""

    def cost(name: str) -> tuple[bool, float]:
        one = found[name]
        return (
            not one.fits,
            max(one.compute_s or 0.0, one.collective_s - one.exposed_s) + one.exposed_s,
        )

    return sorted(found, key=cost)
