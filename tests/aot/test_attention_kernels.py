"""Attention kernels as assembled for Hopper: every tile shape, and when they are chosen."""

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import kernel_reports, parse_target
from colossax.pallas import target
from colossax.pallas.attention import Mask, attention
from colossax.pallas.attention.mosaic_gpu.forward import ForwardVisits, forward
from colossax.pallas.attention.mosaic_gpu.shapes import HEAD_SIZES, tile_for
from tests.aot.assembled import assert_fast, stacked

pytestmark = pytest.mark.aot

HOPPER = parse_target("h100:1x1")
B, S, N, K = 2, 512, 4, 2


def shaped(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(h, hv, dtype=jnp.bfloat16):
    return tuple(shaped(B, S, n, size, dtype=dtype) for n, size in ((N, h), (K, h), (K, hv)))


# Output in the dtype of q or in float32, a bias, soft cap; float16 is the same but for a name.
VARIANTS = {
    "plain": (jnp.bfloat16, jnp.bfloat16, None, None),
    "float16, soft cap": (jnp.float16, jnp.float16, None, 30.0),
    "block of a ring": (jnp.bfloat16, jnp.float32, None, None),
    "later block of a ring": (jnp.bfloat16, jnp.float32, None, None),
    "later block, soft cap": (jnp.float16, jnp.float32, None, 30.0),
    "bias, soft cap": (jnp.bfloat16, jnp.bfloat16, jnp.float32, 30.0),
    "narrow bias": (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, None),
}


@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=lambda sizes: f"{sizes[0]}-{sizes[1]}")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_shape_is_assembled_without_spills(name, sizes):
    (h, hv), (dtype, out, bias, soft_cap) = sizes, VARIANTS[name]
    ranges = {name: shaped(B, S, dtype=jnp.int32) for name in ("lo", "hi")}
    if bias is not None:
        ranges["bias"] = shaped(1, N, S, S, dtype=bias)
    if "later" in name:
        ranges["carried"] = (
            shaped(B, S, N, hv, dtype=jnp.float32),
            shaped(B, N, S, dtype=jnp.float32),
        )
    tile = tile_for(h, hv, bias)

    def run(arrays, given):
        visits = ForwardVisits.of(given.pop("lo"), given.pop("hi"), tile)
        if "block" in name:
            visits = stacked(visits)
        return forward(*arrays, visits=visits, **given, scale=0.1, soft_cap=soft_cap, dtype=out)

    (report,) = kernel_reports(run, HOPPER, operands(h, hv, dtype), ranges)
    staged = out == dtype and h == hv  # else the output goes from registers to memory
    # The loop over tiles is unrolled until its ring is full, once more for the rest.
    copies = 2 * (tile.stages + 1) + (2 * (tile.stages + 1) if bias is not None else 0)
    assert report.instructions == {
        # Three loops; one wgmma multiplies 16 of what is summed over.
        "wgmma": 3 * (h // 16 + tile.keys // 16),
        "tma": 2 + copies + staged,
        "setmaxnreg": 2,
    }
    assert_fast(report)


def llama_layer(q, k, v):
    segments = jnp.zeros((B, S), jnp.int32)
    mask = Mask(causal=True, q_segments=segments, kv_segments=segments, ascending=True)
    return attention(q, k, v, mask=mask)


def test_a_layer_for_hopper_takes_the_kernel():
    with target("gpu", compute_capability=HOPPER.gpu.compute_capability):
        (report,) = kernel_reports(llama_layer, HOPPER, *operands(128, 128))
    assert report.architecture == "sm_90a"
    assert report.instructions["wgmma"] > 0


@pytest.mark.parametrize(
    ("platform", "capability"), [("gpu", (8, 0)), ("gpu", (10, 0)), ("cpu", None)]
)
def test_elsewhere_no_kernel_is_traced(platform, capability):
    def primitives():
        return str(jax.jit(llama_layer).trace(*operands(128, 128)).jaxpr)

    with target("gpu", compute_capability=(9, 0)):
        assert "wgmma" in primitives()
    with target(platform, compute_capability=capability):
        assert "wgmma" not in primitives()
