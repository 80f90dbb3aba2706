"""Plain Flax modules under a plan: their weights are gathered where they are read."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import Plan
from colossax.nn import LayerStack, describe, with_gathers
from colossax.planner import boost
from colossax.sharding import use
from tests import side_by_side
from tests.programs import equations

MIXED, FSDP = {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}


def devices_of(mesh):
    return jax.devices()[: math.prod(mesh.values())]


def losses(make_model, mesh, *, loss=side_by_side.loss, batch=None, dims=side_by_side.DIMS):
    """Of three steps."""
    batch = side_by_side.batch(8, 16) if batch is None else batch
    options = {"devices": devices_of(mesh), "batch_dims": dims}
    state, step = boost(make_model, optax.adamw(1e-3), loss, Plan(mesh=mesh), **options)
    found = []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def on_one_device():
    return losses(side_by_side.maker(own=False, layers=1), {"data": 1})


@pytest.mark.parametrize("mesh, remat", [(MIXED, False), (FSDP, True)], ids=["mixed", "fsdp"])
def test_a_plain_model_trains_as_on_one_device(mesh, remat):
    found = losses(side_by_side.maker(own=False, layers=1, remat=remat), mesh)
    np.testing.assert_allclose(found, on_one_device(), rtol=1e-5)
    assert found[-1] < found[0]


@pytest.mark.catches("own-gathered-twice")
def test_nothing_changes_for_models_of_the_library():
    spec = describe(side_by_side.maker(own=True, layers=1))
    assert with_gathers(spec) is spec


def constraints(make_model, mesh, x):
    """What a forward pass lays out: shape, dtype and layout of each constraint."""
    bound = Plan(mesh=mesh).bind(jax.devices())
    with use(bound):
        spec = with_gathers(describe(make_model))
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), spec.infos)
        traced = jax.make_jaxpr(lambda params, x: spec.merge(params)(x))(params, x)
    found = [eqn for _, eqn in equations(traced) if eqn.primitive.name == "sharding_constraint"]
    return [
        (eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype.name, eqn.params["sharding"].spec)
        for eqn in found
    ]


def named_linear(rngs, **options):
    kernel = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
    return nnx.Linear(16, 32, kernel_init=kernel, rngs=rngs, **options)


@pytest.mark.catches("foreign-left-split")
@pytest.mark.catches("foreign-cast-late")
def test_a_matrix_is_gathered_in_the_dtype_to_which_its_module_casts():
    """Along the batch's axes; its bias has no names and is left alone."""
    x = jnp.ones((8, 16))
    wide = constraints(named_linear, MIXED, x)
    assert [one[:2] for one in wide] == [((16, 32), "float32")] * 2
    assert tuple(wide[0][2]) == ("fsdp", "tensor")
    assert tuple(wide[1][2]) == (None, "tensor")
    narrow = constraints(lambda rngs: named_linear(rngs, dtype=jnp.bfloat16), MIXED, x)
    assert [one[1] for one in narrow] == ["bfloat16"] * 2


def test_a_norm_that_computes_in_float32_is_gathered_in_float32():
    def make_model(rngs):
        scale = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed",))
        return nnx.RMSNorm(16, scale_init=scale, dtype=jnp.bfloat16, rngs=rngs)

    assert {one[1] for one in constraints(make_model, FSDP, jnp.ones((8, 16)))} == {"float32"}


class Tied(nnx.Module):
    """A table that looks up in bfloat16 and is read as it is for the head."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("vocab", "embed"))
        self.table = nnx.Embed(16, 16, embedding_init=init, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x @ self.table.embedding[...].T


class Router(nnx.Linear):
    """A kernel that is multiplied as it is."""

    def __call__(self, x):
        return x @ self.kernel[...]


def router(rngs):
    kernel = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
    return Router(16, 16, kernel_init=kernel, dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.catches("foreign-cast-tables")
@pytest.mark.parametrize("make_model", [Tied, router])
def test_what_may_be_read_as_it_is_keeps_its_dtype(make_model):
    assert {one[1] for one in constraints(make_model, FSDP, jnp.ones((8, 16)))} == {"float32"}


class Recomputed(nnx.Module):
    """Its transforms write the parameters back that they were given."""

    def __init__(self, rngs):
        self.inner = named_linear(rngs)

    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


def test_transforms_of_flax_change_no_parameters():
    def loss(model, batch):
        return jnp.mean(jnp.square(model(batch["x"]) - 1.0))

    dims = {"x": ("batch", None)}
    state, step = boost(Recomputed, optax.sgd(0.1), loss, Plan(mesh=FSDP), batch_dims=dims)
    _, metrics = step(state, {"x": np.ones((8, 16), np.float32)})
    assert 0.5 < float(metrics["loss"]) < 1.5


class PlainStack(nnx.Module):
    """Layers of plain modules in a stack of the library."""

    def __init__(self, rngs):
        self.layers = LayerStack(PlainLayer, 3, rngs=rngs)

    def __call__(self, x):
        return self.layers(x).carry


class PlainLayer(nnx.Module):
    def __init__(self, rngs):
        def make(size, to, *names):
            init = nnx.with_partitioning(nnx.initializers.normal(0.1), names)
            return nnx.Linear(size, to, kernel_init=init, use_bias=False, rngs=rngs)

        self.up = make(16, 32, "embed", "mlp")
        self.down = make(32, 16, "mlp", "embed")

    def __call__(self, x, side, state):
        return x + self.down(jnp.tanh(self.up(x))), state, {}


class PlainScan(nnx.Module):
    """The same by Flax's own loop."""

    def __init__(self, rngs):
        @nnx.vmap
        @nnx.transform_metadata(partition="layers")
        def make(key):
            return PlainLayer(nnx.Rngs(key))

        self.layers = make(jax.random.split(rngs.params(), 3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x, None, None)[0]

        return run(x, self.layers)


def squares(model, batch):
    error = model(batch["x"]) - 1
    return {"error": (jnp.sum(error**2), jnp.float32(error.size), 1.0)}, {}


@pytest.mark.parametrize("make_model", [PlainStack, PlainScan])
def test_layers_in_a_loop_train_as_on_one_device(make_model):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    one, *others = (
        losses(make_model, mesh, loss=squares, batch={"x": x}, dims={"x": ("batch", None)})
        for mesh in ({"data": 1}, MIXED, FSDP)
    )
    for found in others:
        np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.catches("foreign-layers-whole")
@pytest.mark.parametrize("make_model", [PlainStack, PlainScan])
def test_a_loop_over_layers_gathers_one_at_a_time(make_model):
    found = constraints(make_model, FSDP, jnp.ones((8, 16)))
    assert {one[0] for one in found} == {(16, 32), (32, 16)}
