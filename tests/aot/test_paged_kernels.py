"""Attention to pages on an H100 that is not there: what the assembler says, and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from colossax.aot import kernel_reports, parse_target, target_devices
from colossax.pallas import target
from colossax.pallas.paged_attention import Seen, paged_attention
from colossax.pallas.paged_attention.mosaic_gpu.attend import attend
from colossax.pallas.paged_attention.mosaic_gpu.shapes import tile_for
from tests.aot.assembled import assert_fast

pytestmark = pytest.mark.aot

GROUPS, KV_HEADS, PAGES, MOST = 64, 8, 4096, 128
H100 = parse_target("h100:1x1")


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(h, *, width=1, ratio=4, dtype=jnp.bfloat16, page=16, words=False):
    """Queries, keys and values of pages, pages of sequences, and what is seen."""
    ints = functools.partial(shape, dtype=jnp.int32)
    seen = Seen(
        lo=ints(GROUPS, width),
        hi=ints(GROUPS, width),
        base=ints(GROUPS) if words else None,
        words=shape(GROUPS, width, 2, dtype=jnp.uint32) if words else None,
    )
    cache = shape(PAGES, page, KV_HEADS, h, dtype=dtype)
    q = shape(GROUPS, width, KV_HEADS, ratio, h, dtype=dtype)
    return q, cache, cache, ints(GROUPS, MOST), seen


EVERYTHING = {"width": 16, "words": True, "soft_cap": 30.0, "mass": True}
SHIPPED = {
    **{f"heads of {h}": (h, {}) for h in (64, 128, 256)},
    **{f"heads of {h}, everything": (h, EVERYTHING) for h in (64, 128, 256)},
    **{f"heads of {h}, heavy hitters": (h, {"mass": True}) for h in (64, 128, 256)},
    **{f"heads of {h}, trees": (h, {"words": True, "width": 8}) for h in (64, 128, 256)},
    "heads of 256, trees, capped": (256, {"words": True, "width": 16, "soft_cap": 30.0}),
    "heads of 256, heavy hitters, capped": (256, {"mass": True, "soft_cap": 30.0}),
    "heads of 256, heavy hitters, pages of 64": (256, {"mass": True, "page": 64, "width": 8}),
    "one query head": (128, {"ratio": 1}),
    "float16, pages of 128": (128, {"dtype": jnp.float16, "page": 128}),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tiles_are_assembled_without_spills(name):
    h, how = SHIPPED[name]
    how = dict(how)
    options = {"soft_cap": how.pop("soft_cap", None), "mass": how.pop("mass", False)}

    def run(q, k, v, rows, seen):
        return attend(q, k, v, rows=rows, seen=seen, scale=0.1, sinks=None, **options)

    (report,) = kernel_reports(run, H100, *operands(h, **how))
    tile = tile_for(h)
    # Three loops over tiles; one wgmma multiplies 16 of what is summed over.
    assert report.instructions["wgmma"] == 3 * (h // 16 + tile.keys // 16)
    assert report.instructions["setmaxnreg"] == (2 if tile.workers > 1 else 0)
    assert report.instructions["tma"] > 0
    assert_fast(report)


def test_no_layer_of_the_cache_is_copied():
    """The whole stack goes in, and which layer is data."""
    q, cache, _, rows, seen = operands(128)
    stack = shape(4, *cache.shape)
    mesh = Mesh(np.asarray(target_devices(H100)[:1]), ("one",))
    where = NamedSharding(mesh, PartitionSpec())

    def step(q, k, v, layer, rows, seen):
        return paged_attention(q, k, v, layer, rows=rows, seen=seen, scale=0.1).out

    given = (q, stack, stack, shape(dtype=jnp.int32), rows, seen)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), given)
    with target("gpu", compute_capability=(9, 0)):
        compiled = jax.jit(step).trace(*given).lower().compile()
    # Outputs of parts: 4 of 512 slots, [64, 8, 4, 4, 128] float32.
    parts = GROUPS * KV_HEADS * 4 * 4 * 128 * 4
    assert parts < compiled.memory_analysis().temp_size_in_bytes < 2.5 * parts
    assert "mosaic_gpu" in compiled.as_text()
