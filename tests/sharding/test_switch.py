"""Dynamic axis parallelism: `constrain` moves a split from one dim of an array to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from colossax.aot import collectives, parse_module
from colossax.config import Plan
from colossax.sharding import constrain, use
from tests.oracle import assert_trees_close

MSA, RESIDUES, EMBED, HEADS = 16, 24, 8, 2
SHAPE = (2, MSA, RESIDUES, EMBED)


def plan(devices):
    """Either of the two dims is split over `tensor`; the one attended along is whole."""
    rules = Plan().rules.updated(
        activations={
            "msa": "tensor",
            "residue": "tensor",
            "msa:attended": None,
            "residue:attended": None,
        }
    )
    return Plan(mesh={"tensor": devices}, rules=rules)


def along_residues(x, weights, pairs):
    """Attention along dim 2, biased by pairs of residues, for every sequence on its own."""
    q, k, v = (jnp.einsum("bmrd,dnh->bmrnh", x, weights[name]) for name in "qkv")
    logits = jnp.einsum("bmrnh,bmtnh->bmnrt", q, k) / 2 + pairs[:, None]
    mixed = jnp.einsum("bmnrt,bmtnh->bmrnh", jax.nn.softmax(logits), v)
    return x + jnp.einsum("bmrnh,nhd->bmrd", mixed, weights["o"])


def along_sequences(x, weights):
    """Attention along dim 1, for every residue on its own."""
    q, k, v = (jnp.einsum("bmrd,dnh->bmrnh", x, weights[name]) for name in "qkv")
    logits = jnp.einsum("bmrnh,btrnh->brnmt", q, k) / 2
    mixed = jnp.einsum("brnmt,btrnh->bmrnh", jax.nn.softmax(logits), v)
    return x + jnp.einsum("bmrnh,nhd->bmrd", mixed, weights["o"])


def block(params, x, pair_features):
    x = constrain(x, "batch", "msa", "residue:attended", "embed")
    # The pair bias is split where it is made and whole where it is used.
    bias = constrain(pair_features @ params["bias"], "batch", "residue", None, "heads")
    bias = constrain(jnp.moveaxis(bias, 3, 1), "batch", None, None, None)
    x = along_residues(x, params["row"], bias)
    x = constrain(x, "batch", "msa", "residue:attended", "embed")
    x = constrain(x, "batch", "msa:attended", "residue", "embed")
    x = along_sequences(x, params["column"])
    x = constrain(x, "batch", "msa:attended", "residue", "embed")
    return constrain(x, "batch", "msa", "residue:attended", "embed")


def arguments():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.normal(size=shape) * 0.3).astype(np.float32)

    def maps():
        into = {name: draw(EMBED, HEADS, EMBED // HEADS) for name in "qkv"}
        return {**into, "o": draw(HEADS, EMBED // HEADS, EMBED)}

    params = {"row": maps(), "column": maps(), "bias": draw(EMBED, HEADS)}
    return params, draw(*SHAPE), draw(2, RESIDUES, RESIDUES, EMBED)


def value_and_grads(params, x, pairs):
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(block(*a))), argnums=(0, 1, 2))(
        params, x, pairs
    )


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_two_axis_block_equals_one_device(devices):
    want = jax.jit(value_and_grads)(*arguments())
    with use(plan(devices).bind(jax.devices()[:devices])):
        found = jax.jit(value_and_grads)(*arguments())
    assert_trees_close(found, want)


def switch(x):
    x = constrain(x, "batch", "msa", "residue:attended", "embed")
    return constrain(x, "batch", "msa:attended", "residue", "embed")


def compiled(function, bound, *args):
    with use(bound):
        return parse_module(jax.jit(function).lower(*args).compile().as_text())


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_switch_is_one_all_to_all(devices):
    bound = plan(devices).bind(jax.devices()[:devices])
    placed = NamedSharding(bound.mesh, PartitionSpec(None, "tensor"))
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=placed)
    (only,) = collectives(compiled(switch, bound, x), bound.mesh)
    assert (only.kind, only.axis, only.count) == ("all-to-all", "tensor", 1)
    whole = 4 * np.prod(SHAPE)
    assert only.ring_bytes == whole * (devices - 1) / devices**2


def test_its_backward_is_one_too_and_a_block_needs_four():
    bound = plan(8).bind(jax.devices())
    placed = NamedSharding(bound.mesh, PartitionSpec(None, "tensor"))
    params, x, pairs = arguments()
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
    found = collectives(compiled(value_and_grads, bound, params, abstract, pairs), bound.mesh)
    switches = [one for one in found if one.kind == "all-to-all"]
    assert sum(one.count for one in switches) == 4
    assert {one.axis for one in found} == {"tensor"}
