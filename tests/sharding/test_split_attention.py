"""Attention called by itself under plans that split the sequence: rows in natural order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.aot import collectives
from colossax.config import AttentionConfig, Plan
from colossax.errors import PlanError
from colossax.pallas.attention import Mask, xla
from colossax.pallas.attention import attention as on_one_device
from colossax.sharding import RowOrder, attention, in_order, use
from tests.cases import quick_first
from tests.oracle import assert_trees_close

MESHES = {
    "ring": {"ring": 4, "tensor": 2},
    "ulysses": {"ulysses": 4, "data": 2},
    "usp": {"ring": 2, "ulysses": 2, "fsdp": 2},
    "double": {"ring_out": 2, "ring_in": 2, "ulysses": 2},
}


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arguments(*, s=32, t=32, heads=8, kv_heads=4, head_dim=4, v_dim=4, rows=2):
    return {
        "q": drawn(0, rows, s, heads, head_dim),
        "k": drawn(1, rows, t, kv_heads, head_dim),
        "v": drawn(2, rows, t, kv_heads, v_dim),
    }


def segments(length, seed=5):
    ids = np.cumsum(np.random.default_rng(seed).random((2, length)) < 0.15, axis=1)
    return jnp.asarray(np.where(ids > 3, -1, ids), jnp.int32)


def value_and_grads(function, arrays, **fixed):
    """Output, log-partition, and gradients of a sum that weighs both unevenly."""

    def total(arrays):
        out, lse = function(**arrays, **fixed, return_lse=True)
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights) + jnp.sum(jnp.sin(lse)), (out, lse)

    (_, values), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays)
    return values, grads


def assert_equal(arrays, plan, **fixed):
    want = value_and_grads(on_one_device, arrays, implementation="reference", **fixed)
    with use(plan):
        found = value_and_grads(attention, arrays, **fixed)
    assert_trees_close(found, want)


SEGMENTS = segments(32)
MASKS = {
    "causal": Mask(causal=True),
    "all": Mask(),
    "window": Mask(causal=True, window=(5, 0)),
    "packed": Mask(causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS),
}


@pytest.mark.parametrize(
    ("s", "t", "mesh"),
    [
        *quick_first(((30, 30, mesh) for mesh in MESHES), 2),
        *quick_first(((17, 40, mesh) for mesh in reversed(MESHES)), 2),
    ],
)
def test_lengths_that_divide_nothing(devices, mesh, s, t):
    mask = Mask(causal=s == t)
    assert_equal(arguments(s=s, t=t), Plan(mesh=MESHES[mesh]), mask=mask)


@pytest.mark.parametrize("mesh", MESHES)
def test_slopes_sinks_caps_and_other_value_heads(devices, mesh):
    arrays = {
        **arguments(kv_heads=1, v_dim=6),
        "alibi_slopes": jnp.abs(drawn(3, 8)),
        "sinks": drawn(4, 8),
    }
    plan = Plan(mesh=MESHES[mesh])
    assert_equal(arrays, plan, mask=Mask(causal=True), soft_cap=2.0, scale=0.3)


def test_biases_under_ulysses(devices, monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    biases = (drawn(7, 1, 8, 30, 30), drawn(8, 2, 1, 30, 1))
    arrays = {**arguments(s=30, t=30), "biases": biases}
    assert_equal(arrays, Plan(mesh=MESHES["ulysses"]), mask=Mask(causal=True))


def test_a_row_in_balanced_order_stays_in_it(devices):
    """Inside a step nothing is moved: tokens lie so that each device has as much to do."""
    order = RowOrder(ranks=4)
    place = order.indices(32)
    arrays = arguments()
    want = on_one_device(**arrays, mask=Mask(causal=True))[:, place]
    with use(Plan(mesh=MESHES["ring"])), in_order(order):
        moved = {name: x[:, place] for name, x in arrays.items()}
        found = jax.jit(lambda a: attention(**a, mask=Mask(causal=True)))(moved)
    np.testing.assert_allclose(found, want, atol=1e-5)


def refusal(mesh, mask=MASKS["causal"], kernel="auto", scheme="auto", **more):
    heads = more.pop("heads", 8)
    kv_heads = 2 if heads == 6 else 4
    attending = AttentionConfig(kernel=kernel, scheme=scheme)
    with use(Plan(mesh=mesh, attention=attending)), pytest.raises(PlanError) as caught:
        attention(**arguments(heads=heads, kv_heads=kv_heads), mask=mask, **more)
    message = str(caught.value)
    assert message.count("\n") == 0
    return message


def test_what_cannot_be_split_is_refused_in_a_sentence(devices):
    message = refusal({"ulysses": 4, "data": 2}, heads=6)
    assert "6 heads cannot be shared by ulysses=4 devices" in message
    assert "'ring'" in message
    message = refusal({"ulysses": 4, "tensor": 2}, heads=4)
    assert "4 heads cannot be shared by tensor=2 x ulysses=4 devices" in message
    assert "whose product divides 4" in message
    message = refusal(MESHES["ring"], biases=(drawn(0, 1, 8, 32, 32),))
    assert "biases of all pairs" in message and "'ulysses'" in message
    message = refusal(MESHES["ring"], kernel="cudnn")
    assert "plan.attention.kernel: 'cudnn'" in message and "use 'auto'" in message
    message = refusal(MESHES["ring"], kernel="mosaic")
    assert "'mosaic': Mosaic kernels need an NVIDIA GPU" in message and "use 'auto'" in message
    message = refusal(MESHES["ring"], kernel="mosaic", scheme="self_attention")
    assert "'mosaic' cannot compute a row in parts" in message
    message = refusal(MESHES["ring"], mask=MASKS["all"], scheme="zigzag")
    assert "'zigzag' balances causal attention" in message


def test_a_mask_of_one_row_serves_all(devices):
    one = dataclasses.replace(MASKS["packed"], q_segments=SEGMENTS[:1], kv_segments=SEGMENTS[:1])
    assert_equal(arguments(), Plan(mesh=MESHES["usp"]), mask=one)


@pytest.mark.parametrize(
    ("scheme", "mask", "turns"),
    [
        ("auto", MASKS["causal"], True),
        ("zigzag", MASKS["window"], True),
        ("auto", MASKS["window"], False),  # distant chunks never meet in either order
        ("auto", MASKS["all"], False),
        ("ring", MASKS["causal"], False),
    ],
)
def test_rows_in_natural_order_are_balanced_where_that_helps(devices, scheme, mask, turns):
    """Two half shards each of q, k, v and the output then move, beside the ring's own hops."""
    plan = Plan(mesh={"ring": 4, "tensor": 2}, attention=AttentionConfig(scheme=scheme)).bind()
    with use(plan):
        compiled = jax.jit(lambda a: attention(**a, mask=mask)).lower(arguments()).compile()
    found = collectives(compiled.as_text(), plan.mesh)
    shard = 4 * 2 * 8 * 4 * 4  # bytes of q: rows, tokens, heads of one device, head size, float32
    halves = [one for one in found if one.bytes == shard // 2 and one.count == 1]
    assert len([one for one in halves if one.axis == "ring"]) >= (4 if turns else 0)
    assert turns or not halves
