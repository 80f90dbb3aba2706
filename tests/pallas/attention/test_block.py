"""Blocks of keys, merged, are attention to all of them; so are the gradients added up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.aot import parse_module
from colossax.pallas import target
from colossax.pallas.attention import (
    Mask,
    attend_block,
    attention,
    block_gradients,
    merge_blocks,
    row_delta,
    with_sinks,
    xla,
)
from tests.oracle import assert_trees_close

B, S, N, K, H = 2, 24, 4, 2, 8
CUT = 10
SEGMENTS = jnp.repeat(jnp.asarray([[0, 1, -1], [-1, 2, 3]], jnp.int32), 8, axis=1)
MASKS = {
    "everything": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(4, 0)),
    "packed": Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS),
    "holes": Mask(causal=True, kv_valid=jnp.arange(S)[None] % 5 > 1),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})


def operands(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (N, K, K, N)
    q, k, v, dout = (jax.random.normal(r, (B, S, n, H)) for r, n in zip(keys, heads, strict=True))
    return tuple(2 * x.astype(dtype) for x in (q, k, v, dout))


def part(mask, keys):
    """The mask of some of the keys, whose positions stay what they were."""
    whole = {"kv_positions": jnp.arange(S)[None], "kv_segments": mask.kv_segments}
    fields = whole | {"kv_valid": mask.kv_valid}
    cut = {name: None if x is None else x[:, keys] for name, x in fields.items()}
    return Mask(causal=mask.causal, window=mask.window, q_segments=mask.q_segments, **cut)


@pytest.mark.catches("merge-log-partition")
def test_merged_blocks_weigh_what_their_partitions_do():
    """Three to one, alike, one over nothing and both over nothing."""
    outs = np.stack([np.full((1, 4, 1, 2), 1.0), np.full((1, 4, 1, 2), 5.0)]).astype(np.float32)
    nothing = -np.inf
    lses = np.log([[3.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]]).astype(np.float32)
    lses[0, 3] = lses[1, 2:] = nothing
    outs[0, :, 3] = outs[1, :, 2:] = 0.0
    out, lse = jnp.asarray(outs), jnp.asarray(lses)[:, None, None]
    out, total = merge_blocks(out[0], lse[0], out[1], lse[1])
    np.testing.assert_allclose(out[0, :, 0], [[2.0] * 2, [3.0] * 2, [1.0] * 2, [0.0] * 2])
    np.testing.assert_allclose(total[0, 0], [*np.log([4.0, 4.0, 1.0]), nothing], rtol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_two_blocks_are_the_whole(name):
    q, k, v, dout = operands()
    slopes = jnp.asarray([0.3, 0.1, 0.2, 0.05])
    options = {"alibi_slopes": slopes, "scale": 0.3, "soft_cap": 4.0}

    def whole(q, k, v, slopes):
        return attention(
            q,
            k,
            v,
            mask=MASKS[name],
            implementation="reference",
            return_lse=True,
            **options | {"alibi_slopes": slopes},
        )

    (out, lse), pull = jax.vjp(whole, q, k, v, slopes)
    dlse = jnp.where(jnp.isneginf(lse), 1, jnp.cos(lse))  # where nothing is seen it does nothing
    cuts = slice(0, CUT), slice(CUT, S)
    parts = [attend_block(q, k[:, c], v[:, c], mask=part(MASKS[name], c), **options) for c in cuts]
    found = merge_blocks(*parts[0], *parts[1])
    empty = jnp.isneginf(lse)
    np.testing.assert_array_equal(jnp.isneginf(found[1]), empty)
    assert_trees_close((found[0], jnp.where(empty, 0, found[1])), (out, jnp.where(empty, 0, lse)))
    given = {"dout": dout, "lse": lse, "delta": row_delta(out, lse, dout, dlse)}
    first, second = (
        block_gradients(q, k[:, c], v[:, c], mask=part(MASKS[name], c), **options, **given)
        for c in cuts
    )
    gradients = (
        first[0] + second[0],
        *(jnp.concatenate([a, b], axis=1) for a, b in zip(first[1:3], second[1:3], strict=True)),
        first[3] + second[3],
    )
    assert_trees_close(gradients, pull((dout, dlse)))


@pytest.mark.catches("sink-adds-output")
def test_a_sink_is_one_more_logit():
    q, k, v, _ = operands()
    sinks = jnp.asarray([0.5, -1.0, 3.0, 0.0])
    options = {"mask": MASKS["packed"], "scale": 0.3}
    found = with_sinks(*attend_block(q, k, v, **options), sinks)
    wanted = attention(q, k, v, sinks=sinks, return_lse=True, implementation="reference", **options)
    assert_trees_close(found, wanted)


def test_blocks_of_bfloat16_are_float32():
    q, k, v, dout = operands(jnp.bfloat16)
    out, lse = attend_block(q, k, v, mask=Mask(), scale=1.0)
    gradients = block_gradients(
        q, k, v, mask=Mask(), scale=1.0, dout=dout, lse=lse, delta=row_delta(out, lse, out, lse)
    )
    assert {x.dtype for x in (out, lse, *gradients[:3])} == {jnp.dtype(jnp.float32)}
    assert gradients[3] is None
    rounded = attention(q, k, v, mask=Mask(), scale=1.0, implementation="xla")
    np.testing.assert_array_equal(out.astype(jnp.bfloat16), rounded)


@pytest.mark.parametrize(("mask", "known"), [(Mask(), True), (Mask(causal=True), False)])
def test_where_nothing_is_hidden_nothing_is_compared_and_loops_have_a_known_length(mask, known):
    q, k, v, dout = operands()

    def both(q, k, v, dout):
        out, lse = attend_block(q, k, v, mask=mask, scale=1.0)
        return block_gradients(
            q,
            k,
            v,
            mask=mask,
            scale=1.0,
            dout=dout,
            lse=lse,
            delta=row_delta(out, lse, dout, jnp.zeros_like(lse)),
        )

    lowered = jax.jit(both).lower(q, k, v, dout)
    module = parse_module(lowered.compile().as_text())
    trips = [one.trip_count for one in module.by_name.values() if one.opcode == "while"]
    assert sorted(x for x in trips if x) == ([3] * 4 if known else [3] * 2)
    assert (None in trips) is not known
    compared = [line for line in lowered.as_text().splitlines() if "x8x8xi1>" in line]
    assert bool(compared) is not known


@pytest.mark.parametrize(
    ("capability", "implementation", "kernel"),
    [((9, 0), "auto", True), ((9, 0), "xla", False), ((8, 0), "auto", False)],
)
def test_both_steps_take_the_kernel_on_hopper(capability, implementation, kernel):
    q, k, v = (jnp.zeros((1, 128, n, 64), jnp.bfloat16) for n in (2, 1, 1))
    rows = jnp.zeros((1, 2, 128))
    options = {"mask": Mask(causal=True), "scale": 1.0, "implementation": implementation}
    with target("gpu", compute_capability=capability):
        forward = jax.make_jaxpr(functools.partial(attend_block, **options))(q, k, v)
        backward = jax.make_jaxpr(functools.partial(block_gradients, **options))(
            q, k, v, dout=q, lse=rows, delta=rows
        )
    assert [("wgmma" in str(x)) for x in (forward, backward)] == [kernel] * 2
    assert [x.dtype for x in forward.out_avals] == [jnp.float32] * 2
    assert {x.dtype for x in backward.out_avals} == {jnp.dtype(jnp.float32)}


def test_a_step_named_declines_with_its_reason():
    q, k, v, _ = operands()
    with pytest.raises(NotImplementedError, match="'mosaic': Mosaic kernels need an NVIDIA GPU"):
        attend_block(q, k, v, mask=Mask(), scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="no implementation 'cudnn'"):
        attend_block(q, k, v, mask=Mask(), scale=1.0, implementation="cudnn")
