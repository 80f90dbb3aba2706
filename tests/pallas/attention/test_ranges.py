"""What is computed of a mask alone is carried to its layers, and never taken for another's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import (
    Mask,
    Operands,
    Scoring,
    api,
    attention,
    backward_block,
    block_ranges,
    forward_block,
    reference,
    row_delta,
    with_ranges,
    xla,
)
from colossax.pallas.attention.mask import RANGES
from colossax.pallas.target import target
from tests.pallas.places import everywhere
from tests.programs import equations

B, S, N, H = 2, 40, 2, 64
SEGMENTS = jnp.asarray(np.stack([np.repeat([0, 1, -1], [17, 20, 3]), np.repeat([0, 1], [30, 10])]))
PACKED = Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS, ascending=True)


def arrays(dtype=jnp.float32):
    return tuple(
        jax.random.normal(k, (B, S, N, H), dtype) for k in jax.random.split(jax.random.key(1), 3)
    )


def carrying(mask, name="xla", dtype=jnp.float32):
    x = jax.ShapeDtypeStruct((B, S, N, H), dtype)
    return with_ranges(Operands(q=x, k=x, v=x, mask=mask), Scoring.of(x), implementation=name)


def both_ways(q, k, v, mask, name="xla"):
    def run(q, k, v):
        out = attention(q, k, v, mask=mask, implementation=name)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(q, k, v)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 16})


@pytest.mark.catches("ranges-of-other-tiles")
def test_those_of_other_tiles_or_lengths_are_left_alone(monkeypatch):
    mask, expected = carrying(PACKED), both_ways(*arrays(), PACKED)
    assert mask.ranges is not None
    same(both_ways(*arrays(), mask), expected)
    short = tuple(x[:, :32] for x in arrays())
    cut = dict.fromkeys(("q_segments", "kv_segments"), SEGMENTS[:, :32])
    here = PACKED.changed(**cut)
    same(attention(*short, mask=here.changed(ranges=mask.ranges)), attention(*short, mask=here))
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    same(both_ways(*arrays(), mask), both_ways(*arrays(), PACKED))


@pytest.mark.catches("ranges-outlive-mask")
def test_a_mask_that_is_changed_carries_none():
    mask = carrying(PACKED)
    assert mask.changed(causal=False).ranges is None
    other = mask.changed(q_segments=SEGMENTS[::-1], kv_segments=SEGMENTS[::-1])
    same(
        attention(*arrays(), mask=other), attention(*(x[::-1] for x in arrays()), mask=PACKED)[::-1]
    )


def test_a_mask_without_arrays_and_one_of_several_batch_dims_carry_nothing():
    assert carrying(Mask(causal=True)).ranges is None
    x = jax.ShapeDtypeStruct((1, B, S, N, H), jnp.float32)
    deep = jax.tree.map(lambda x: x[None], PACKED)
    assert with_ranges(Operands(q=x, k=x, v=x, mask=deep), Scoring.of(x)).ranges is None


def test_an_implementation_of_ones_own_says_what_is_carried(monkeypatch):
    """Made once before a scan of three layers, found in each."""
    made, found = [], []
    toy = types.ModuleType("toy")
    toy.why_not = lambda spec, target: None

    def ranges_of(mask, spec):
        made.append(spec)
        return {"seen": jnp.sum(mask.q_segments >= 0, axis=1)}

    def attend(operands, scoring):
        found.append(operands.mask.ranges)
        return reference.attend(operands, scoring)

    toy.ranges_of, toy.attend = ranges_of, attend
    monkeypatch.setitem(api.IMPLEMENTATIONS, "toy", toy)
    mask = carrying(PACKED, "toy")
    layers = jnp.ones(3)
    _, k, v = arrays()

    def layer(x, scale):
        return attention(x * scale, k, v, mask=mask, implementation="toy"), None

    jax.lax.scan(layer, arrays()[0], layers)
    assert [str(spec) for spec in made] == [
        "2 x 40 x 40, 2/2 heads of 64, float32, causal, segments"
    ]
    assert found and all(each["seen"].tolist() == [37, 40] for each in found)


@pytest.mark.catches("kernel-visits-in-layers")
def test_the_kernels_compute_nothing_of_the_mask_but_what_they_carry():
    """Traced for a GPU, forward and backward: the interpreter's values are those of the kernels."""
    q, k, v = arrays(jnp.bfloat16)

    def run(q, k, v, mask):
        out = attention(q, k, v, mask=mask, implementation="mosaic")
        return jnp.sum(out.astype(jnp.float32))

    with target("gpu", compute_capability=(9, 0)):
        mask = carrying(PACKED, "mosaic", jnp.bfloat16)
        counts = {
            name: sum(
                RANGES in str(one.source_info.name_stack)
                for _, one in equations(jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(q, k, v, given))
            )
            for name, given in (("carried", mask), ("not carried", PACKED))
        }
    assert counts["carried"] == 0 and counts["not carried"] > 50


@pytest.mark.parametrize("place", [pytest.param("interpret", marks=pytest.mark.sweep)])
def test_values_of_the_kernels_are_the_same_bits(place):
    given = arrays(jnp.bfloat16)
    mask = carrying(PACKED, place, jnp.bfloat16)
    same(both_ways(*given, mask, place), both_ways(*given, PACKED, place))


OTHER = jnp.asarray(np.stack([np.repeat([0, 1, 2], [9, 11, 20]), np.repeat([0, -1], [25, 15])]))


def both_directions(mask, name, given):
    """A block's output, and all gradients of one over it."""
    q, k, v, dout = given
    block, scoring = Operands(q=q, k=k, v=v, mask=mask), Scoring.of(q)
    out, lse = forward_block(block, scoring, implementation=name)
    backward = {"dout": dout, "lse": lse, "delta": row_delta(out, lse, dout, jnp.zeros_like(lse))}
    return out, lse, backward_block(block, scoring, **backward, implementation=name)


@everywhere
@pytest.mark.catches("kernel-step-of-ring")
@pytest.mark.catches("kernel-step-of-ring-backward")
def test_of_ranges_stacked_for_a_ring_a_kernel_picks_its_step(place):
    given = (*arrays(jnp.bfloat16), arrays(jnp.bfloat16)[0])
    steps = jnp.stack([SEGMENTS, OTHER, SEGMENTS[::-1]])
    q, k, v, _ = given

    def made(segments):
        mask = PACKED.changed(q_segments=segments, kv_segments=segments)
        return block_ranges(Operands(q=q, k=k, v=v, mask=mask), Scoring.of(q), implementation=place)

    stacks = jax.vmap(made)(steps)
    run = jax.jit(both_directions, static_argnums=1)
    for number, segments in enumerate(steps):
        mask = PACKED.changed(q_segments=segments, kv_segments=segments)
        stepped = mask.changed(ranges=stacks.ranges.of_step(jnp.int32(number)))
        same(run(stepped, place, given), run(mask, place, given))
