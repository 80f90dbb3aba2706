"""What surrounds a ring: what it keeps, devices of other mesh axes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from colossax.errors import PlanError
from colossax.pallas.attention import Mask, Operands, Scoring
from colossax.sharding.sequence import RingAxes, Settings, ring_attention_local, ulysses_local
from colossax.sharding.sequence.axes import Packing
from tests.oracle import assert_trees_close
from tests.sharding.sequence.support import Layout, loss, operands, truth

CAUSAL = Mask(causal=True)


def causal(q, k, v):
    return Operands(q=q, k=k, v=v, mask=CAUSAL)


def on_mesh(scheme, mesh):
    """q, k, v split along `ring` only, whatever other axes the mesh has."""
    spec = P(None, "ring")
    settings = Settings(axes=RingAxes(inner="ring", inner_size=4), order="contiguous")
    local = jax.shard_map(
        lambda *qkv: ring_attention_local(causal(*qkv), Scoring(scale=0.5), settings),
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec, P(None, None, "ring")),
        check_vma=False,
    )
    return scheme(local)


@pytest.mark.parametrize("saved", ["ring", "all_gather"])
def test_residuals_are_shards_of_inputs_output_and_log_partition(saved):
    layout = Layout(ring=8, scheme=saved)
    q, k, v, _, _ = operands(b=1, s=64)
    _, pull = jax.eval_shape(
        lambda *qkv: jax.vjp(lambda *x: layout.island(*x, None, None, CAUSAL), *qkv), q, k, v
    )
    kept = sorted(x.size for x in jax.tree.leaves(pull) if x.size > 1)
    assert kept == sorted([q.size, k.size, v.size, q.size, 8 * 64])


def test_under_vmap_over_another_mesh_axis():
    """As the stages of a pipeline stand: one region manual over the whole mesh."""
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("stage", "ring"), axis_types=(AxisType.Auto,) * 2)
    arrays = [jnp.stack([x, x[::-1] * 0.5]) for x in operands()[:3]]

    def total(attend):
        return lambda *qkv: jnp.sum(jax.vmap(lambda *x: loss(*attend(*x)))(*qkv))

    def staged(local):
        return lambda *qkv: jnp.sum(
            jax.vmap(lambda *x: loss(*local(*x)), spmd_axis_name="stage")(*qkv)
        )

    found = jax.jit(jax.grad(on_mesh(staged, mesh), (0, 1, 2)))(*arrays)
    wanted = jax.grad(total(lambda *qkv: truth(*qkv, None, None, CAUSAL)), (0, 1, 2))(*arrays)
    assert_trees_close(found, wanted)


def test_arrays_of_one_kind_are_stacked_and_come_back():
    tree = {"a": jnp.arange(3), "b": jnp.ones((2,)), "c": 2 * jnp.arange(3), "d": None}
    packing = Packing.of(tree)
    packed = packing.pack(tree)
    assert sorted(x.shape for x in packed) == [(2,), (2, 3)]
    assert jax.tree.all(jax.tree.map(np.array_equal, packing.unpack(packed), tree))


def test_an_outer_size_needs_an_axis():
    with pytest.raises(ValueError, match="outer_size is 2 without an outer axis; name the axis"):
        RingAxes(inner="ring", inner_size=4, outer_size=2)


def test_ulysses_refuses_heads_that_it_cannot_split():
    q, k, v, _, _ = operands(heads=6, kv_heads=2)
    with pytest.raises(PlanError, match="6 query heads .* 4 devices of mesh axis 'ulysses'.* 6"):
        given = causal(q, k, v), Scoring(scale=1.0)
        ulysses_local(lambda *_, **__: (q, q), *given, axis="ulysses", size=4)


def test_order_is_refused_before_anything_is_traced():
    q, k, v, _, _ = operands(s=9)
    with pytest.raises(ValueError, match="9 tokens per rank are no two equal chunks"):
        settings = Settings(axes=RingAxes(inner="ring", inner_size=4))
        ring_attention_local(causal(q, k, v), Scoring(scale=1.0), settings)
