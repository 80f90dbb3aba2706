"""FLOPs of traced programs, by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from colossax.config import Plan
from colossax.planner.counting.traced_flops import traced_flops
from tests.run.test_fit import boosted
from tests.run.test_task import ROWS, WIDTH, rows

M, K, N = 8, 16, 32
PRODUCT = 2 * M * K * N
X, W = jnp.ones((M, K)), jnp.ones((K, N))


def counted(f, *arguments):
    return traced_flops(jax.jit(f).trace(*arguments).jaxpr)


def in_loop(x, w):
    return jax.lax.scan(lambda carry, _: (carry, carry @ w), x, length=5)[1]


def chosen(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: (x @ w) @ w.T, lambda: x)


def under_condition(x, w):
    body = lambda y: y + (x @ w).sum()  # noqa: E731
    return jax.lax.while_loop(lambda y: y < 1, body, 0.0)


CASES = {
    "matmul": (lambda x, w: x @ w, 1),
    "its gradients": (jax.grad(lambda x, w: ((x @ w) ** 2).sum(), argnums=(0, 1)), 3),
    "recomputed": (
        jax.grad(lambda x, w: jax.checkpoint(lambda x: jnp.sin((x @ w) @ w.T))(x).sum()),
        2 + 2 + 2,
    ),
    "batched": (lambda x, w: jax.vmap(lambda x: x @ w)(jnp.stack([x, x])), 2),
    "in a loop": (in_loop, 5),
    "the dearest branch": (chosen, 2),
}


@pytest.mark.catches("traced-flops-of-loops-once")
@pytest.mark.parametrize("case", CASES)
def test_matmuls_count_as_often_as_they_run(case):
    function, times = CASES[case]
    found = counted(function, X, W)
    assert (found.flops, found.left_out) == (times * PRODUCT, ())


@pytest.mark.catches("traced-float8-wide")
def test_what_is_multiplied_in_float8_is_told_apart():
    """Both factors must be: another matmul takes them in the dtype of the wider."""
    x, w = X.astype(jnp.float8_e5m2), W.astype(jnp.float8_e4m3fn)
    dims = (((1,), (0,)), ((), ()))

    def f(x, w):
        narrow = jax.lax.scan(
            lambda carry, _: (carry, jax.lax.dot_general(x, w, dims)), 0, length=3
        )
        return narrow, jax.lax.dot_general(x, W, dims, preferred_element_type=jnp.float32)

    found = counted(f, x, w)
    assert (found.flops, found.float8_flops) == (4 * PRODUCT, 3 * PRODUCT)


def test_a_loop_that_a_condition_ends_is_counted_once_and_said():
    found = counted(under_condition, X, W)
    assert found.flops == PRODUCT
    assert found.left_out == ("all runs but one of loops that end by a condition",)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_costs_each_gradient_what_it_costs_itself(groups):
    x, w = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4 // groups, 8))
    forward = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (2, 2), "SAME", feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    one = 2 * (2 * 4 * 4 * 8) * (3 * 3 * 4 // groups)
    assert counted(forward, x, w).flops == one
    both = jax.grad(lambda x, w: (forward(x, w) ** 2).sum(), argnums=(0, 1))
    assert counted(both, x, w).flops == pytest.approx(3 * one, rel=0.2)


def test_what_each_device_does_is_counted_for_all(devices):
    mesh = Plan(mesh={"fsdp": 4}).bind(devices[:4]).mesh
    rows_of = PartitionSpec("fsdp")
    product = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(rows_of, PartitionSpec()), out_specs=rows_of
    )
    assert counted(product, X, W).flops == PRODUCT


def test_kernels_are_said_to_be_left_out():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    from jax.experimental import pallas

    product = pallas.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32), interpret=True
    )
    assert counted(product, X, W).left_out == ("Pallas kernels",)


@pytest.mark.slow
def test_a_step_of_two_devices_counts_both_and_its_update_nothing(devices):
    _, step = boosted()
    batch = step.abstract_batch(
        {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows(0).items()}
    )
    traced = step.jitted.trace(step.abstract, batch)
    up, down = 2 * ROWS * WIDTH * 8, 2 * ROWS * 8
    # Of the rows themselves no gradient is wanted.
    assert traced_flops(traced.jaxpr).flops == 2 * up + 3 * down
