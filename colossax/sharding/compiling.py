"""What the compiler must be told for a plan's communication to run beside its computation."""

from typing import Any

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding.experts.overlap import CHUNK_OPTIONS
from colossax.sharding.sequence import DOUBLE_RING_OPTIONS


def compiler_options(bound: BoundPlan) -> dict[str, Any]:
    """Options of XLA for programs under this plan; the plan's own come last."""
    sizes, device = bound.mesh.shape, bound.mesh.devices.flat[0]
    gpu = device.platform in ("gpu", "cuda")
    double = sizes[MeshAxis.RING_OUT] > 1 and sizes[MeshAxis.RING_IN] > 1
    needed = DOUBLE_RING_OPTIONS if gpu and double else {}
    if gpu and bound.plan.experts.chunks != 1:
        needed = {**needed, **CHUNK_OPTIONS}
    return {**needed, **bound.plan.compiler_options}
