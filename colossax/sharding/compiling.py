"""What the compiler must be told for a plan's communication to run beside its computation."""

from typing import Any

from colossax.config import BoundPlan, MeshAxis
from colossax.sharding.experts.overlap import CHUNK_OPTIONS
from colossax.sharding.sequence import DOUBLE_RING_OPTIONS

GPU_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Of every program for GPUs: what is sent goes beside what is computed. Left to itself XLA does so
on Hopper and later alone, and there where it can tell the time of each collective in the program;
an A100 waits (tests/aot/test_overlap.py)."""

HOST_EXPERTS_OPTIONS = {"xla_gpu_experimental_parallel_async_compute_limit": 8}
"""The next layer's experts come, and gradients of the last one's go, beside a whole layer; with two
at once, the default, all but two of them stop it."""

STAGE_OPTIONS = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
"""Of stages beside `data`: that pass takes the reduction of a layer's gradients out of the loop
over a stage's layers, where as many bytes are sent, and has their sum of all layers twice for it,
one of them a constant of the program: of MT-NLG more than 14 GB, in the host's memory while it is
made. Where `data` has one device, a step takes 0.2 GiB more without it (Llama 3 8B)."""

FLOAT8_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""The compiler tries out tilings of its own beside cuBLAS, adds up in float8 otherwise than cuBLAS
with most of them, and compares every number of each with the rest: a product of 4096 x 2048 x 4096
then compiles in 9 s on an H100 in place of 0.2, a large model's step in minutes, and cuBLAS's was
the fastest of each (bench/LOG.md)."""


def compiler_options(bound: BoundPlan) -> dict[str, Any]:
    """Options of XLA for programs under this plan; the plan's own come last."""
    sizes, device = bound.mesh.shape, bound.mesh.devices.flat[0]
    if device.platform not in ("gpu", "cuda"):
        return dict(bound.plan.compiler_options)
    needed: dict[str, Any] = GPU_OPTIONS
    if sizes[MeshAxis.RING_OUT] > 1 and sizes[MeshAxis.RING_IN] > 1:
        needed = {**needed, **DOUBLE_RING_OPTIONS}
    if bound.plan.experts.chunks != 1:
        needed = {**needed, **CHUNK_OPTIONS}
    if bound.plan.offload.experts:
        needed = {**needed, **HOST_EXPERTS_OPTIONS}
    if sizes[MeshAxis.STAGE] > 1 and sizes[MeshAxis.DATA] > 1:
        needed = {**needed, **STAGE_OPTIONS}
    if bound.plan.precision.matmul == "float8":
        needed = {**needed, **FLOAT8_OPTIONS}
    return {**needed, **bound.plan.compiler_options}
