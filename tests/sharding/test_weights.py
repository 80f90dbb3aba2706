"""Weights of any kind in `linear` and `linears`: by type, in order, with rules of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import Plan
from colossax.errors import InputError
from colossax.sharding import Dense, Weight, gather_weight, linear, linears, use
from tests.oracle import assert_trees_close

B, S, D, F = 4, 6, 8, 16
UP = ("embed", "mlp")
CALLS: list[int] = []
"""Maps that `Scaled` was given, call by call."""


@jax.custom_vjp
def rounded(w):
    """To whole numbers; backward does not see it."""
    return jnp.round(w)


rounded.defvjp(lambda w: (rounded(w), None), lambda _, dw: (dw,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """Whole numbers times one scale for each row, kept apart, with a derivative of its own."""

    whole: Any
    scale: Any
    dims: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self):
        return self.whole.shape

    @staticmethod
    def multiply(x, maps, *, contract):
        CALLS.append(len(maps))
        return tuple(
            jnp.tensordot(x, own.gathered(), contract) + (0 if bias is None else bias)
            for own, bias in maps
        )

    def rows(self, ids):
        return self.gathered()[ids]

    def gathered(self, *, to=None):
        whole = gather_weight(self.whole, self.dims, to=to)
        return rounded(whole) * gather_weight(self.scale, (self.dims[0],))[:, None]


def drawn():
    """x, three matrices, the scale of rows of the second and third, and biases of the first two."""
    keys = jax.random.split(jax.random.key(0), 7)
    x = jax.random.normal(keys[0], (B, S, D))
    matrices = [3 * jax.random.normal(key, (D, F)) for key in keys[1:4]]
    scale = jax.random.uniform(keys[4], (D,), minval=0.5)
    return x, matrices, scale, [jax.random.normal(key, (F,)) for key in keys[5:]]


def mixed(x, matrices, scale, biases):
    """Dense, other, dense by its three parts, other."""
    first, second, third = matrices
    return linears(
        x,
        (
            (Dense(first, UP), biases[0]),
            (Scaled(second, scale, UP), biases[1]),
            (third, UP, None),
            (Scaled(third, scale, UP), None),
        ),
    )


def plainly(x, matrices, scale, biases):
    def whole(w):
        return (w + jax.lax.stop_gradient(jnp.round(w) - w)) * scale[:, None]

    first, second, third = matrices
    return x @ first + biases[0], x @ whole(second) + biases[1], x @ third, x @ whole(third)


def outputs_and_gradients(run, arrays):
    def total(*arrays):
        ys = run(*arrays)
        return sum(jnp.sum(jnp.sin(y) * n) for n, y in enumerate(ys, 1)), ys

    return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(*arrays)


PLANS = {
    "none": None,
    "fsdp and tensor": Plan(mesh={"fsdp": 4, "tensor": 2}),
    "2d": Plan(mesh={"fsdp": 2, "row": 2, "col": 2}, tensor_layout="2d"),
}


@pytest.mark.catches("weights-mixed-up")
@pytest.mark.parametrize("plan", PLANS)
def test_each_type_multiplies_its_maps_together_and_they_come_back_in_order(devices, plan):
    arrays = drawn()
    want = outputs_and_gradients(plainly, arrays)
    CALLS.clear()
    with use(None if PLANS[plan] is None else PLANS[plan].bind(devices)):
        got = outputs_and_gradients(mixed, arrays)
    assert CALLS == [2]
    assert_trees_close(got, want)


@pytest.mark.parametrize("dense", [0, 1, 3])
def test_dense_ones_share_a_region_whatever_stands_between_them(devices, dense):
    x, (first, second, _), scale, _ = drawn()
    maps = [(Dense(first, UP), None)] * dense
    maps.insert(1, (Scaled(second, scale, UP), None))
    with use(PLANS["2d"].bind(devices)):
        text = str(jax.make_jaxpr(lambda x: linears(x, maps))(x))
    assert text.count("shard_map[") == min(dense, 1)


def test_a_weight_is_a_pytree_that_crosses_jit(devices):
    x, (w, _, _), scale, (bias, _) = drawn()
    for weight, dense in ((Dense(w, UP), w), (Scaled(w, scale, UP), jnp.round(w) * scale[:, None])):
        assert isinstance(weight, Weight)
        assert weight.shape == (D, F) and weight.dims == UP
        y = jax.jit(lambda x, w, b: linear(x, w, bias=b))(x, weight, bias)
        np.testing.assert_allclose(y, x @ dense + bias, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(weight.gathered(), dense)
        ids = jnp.array([[3, 0], [7, 3]])
        np.testing.assert_array_equal(weight.rows(ids), dense[ids])


def test_dims_belong_to_arrays_alone():
    x, (w, _, _), _, _ = drawn()
    with pytest.raises(InputError, match=r"of shape \(8, 16\) and comes with dims None; name"):
        linear(x, w)
    with pytest.raises(InputError, match="w is a Dense of shape .* leave them out where a weight"):
        linear(x, Dense(w, UP), UP)
    with pytest.raises(ValueError, match="must be equal"):
        linear(x, Dense(w.T, UP[::-1]))
