"""How fast devices exchange and compute the rows of experts: `plan.experts.chunks` of auto."""

import dataclasses
import logging

from colossax.aot import Target
from colossax.config import ExpertRates, Plan
from colossax.config.axes import GROUP_AXES
from colossax.planner.counting.flops import peak_flops
from colossax.planner.counting.traffic import ASSUMED_EFFICIENCY

CHUNKS = "plan.experts.chunks auto"
"""How lines of what was decided begin."""

COMPUTE_S = 2e-5
"""Assumed to begin what experts compute: some kernels, one after another."""

_LOG = logging.getLogger(__name__)


def with_chunk_rates(plan: Plan, target: Target | None, devices: list) -> tuple[Plan, str | None]:
    """The plan with rates by which layers choose their chunks, or with one chunk, and why.

    Args:
        plan: Unchanged, without a line, where it has a number of chunks, or rates of its own.
        target: GPUs of known links; None: the number of chunks is 1.
        devices: Whose mesh it is.
    """
    experts = plan.experts
    if experts.chunks != "auto" or experts.rates is not None:
        return plan, None
    rates = None if target is None else _rates(plan, target, devices)
    if rates is None:
        experts = dataclasses.replace(experts, chunks=1)
        line = f"{CHUNKS}: 1, how fast rows travel between the devices is not known; give"
        line += " plan.experts.rates"
    else:
        experts = dataclasses.replace(experts, rates=rates)
        line = (
            f"{CHUNKS}: of each layer what takes least time at {rates.bytes_per_s / 1e9:.0f} GB/s"
            f" and {rates.flops_per_s / 1e12:.0f} TFLOP/s (data sheets, {ASSUMED_EFFICIENCY:.0%} of"
            " the peak)"
        )
    _LOG.info(line)
    return plan.replace(experts=experts), line


def _rates(plan: Plan, target: Target, devices: list) -> ExpertRates | None:
    """By peaks of the compute dtype, in which experts multiply whatever `precision.matmul` says."""
    mesh = plan.bind(devices).mesh
    axes = [axis for axis in GROUP_AXES if mesh.shape.get(axis, 1) > 1]
    peaks = [peak_flops(island.gpu.name, plan.precision.compute) for island in target.islands]
    known = [peak for peak in peaks if peak is not None]
    if not axes or len(known) < len(peaks):
        return None
    link = target.link(mesh, axes)
    return ExpertRates(
        exchange_s=link.latency_s,
        bytes_per_s=link.bytes_per_s,
        compute_s=COMPUTE_S,
        flops_per_s=min(known) * ASSUMED_EFFICIENCY,
    )
