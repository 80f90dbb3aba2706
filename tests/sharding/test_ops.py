"""The plan in force: contexts, constraints, linear maps, table look-ups."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from colossax.config import Plan, Precision, preset
from colossax.errors import PlanError
from colossax.sharding import constrain, current, gather_weight, linear, use
from tests.oracle import assert_trees_close


def test_plans_nest_and_end(devices):
    outer, inner = Plan().bind(devices), Plan().bind(devices[:2])
    assert current() is None
    with use(outer):
        assert current() == outer
        with use(inner):
            assert current() == inner
        with use(None):
            assert current() is None
        assert current() == outer
    assert current() is None


def test_switching_plans_under_one_jitted_function_traces_again(devices):
    """A plain context variable would hand the second plan the first one's program."""

    @jax.jit
    def f(x):
        return constrain(x * 1.0, "batch", "mlp")

    x = jnp.ones((8, 8))
    with use(Plan(mesh={"fsdp": 8}).bind(devices)):
        assert f(x).sharding.spec == P("fsdp")
    with use(preset("megatron", mesh={"tensor": 8}).bind(devices)):
        assert f(x).sharding.spec == P(None, "tensor")
    assert f(x).sharding.is_fully_replicated


def test_constrain_refuses_what_does_not_divide(devices):
    with use(Plan(mesh={"fsdp": 8}).bind(devices)):
        with pytest.raises(PlanError, match="dim 'batch' has size 6"):
            constrain(jnp.ones((6, 4)), "batch", "embed")


@pytest.mark.catches("bias-of-linear")
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"data": 2, "tensor": 4}])
@pytest.mark.parametrize("contract", [1, 2])
def test_linear_equals_plain_mathematics_with_gradients(devices, mesh, contract):
    key = jax.random.key(0)
    dims = ("embed", "heads", "head_dim") if contract == 1 else ("heads", "head_dim", "embed")
    shape = (16, 8, 4) if contract == 1 else (8, 4, 16)
    x = jax.random.normal(key, (8, 6, *shape[:contract]))
    w = jax.random.normal(jax.random.fold_in(key, 1), shape)
    b = jax.random.normal(jax.random.fold_in(key, 2), shape[contract:])

    def through(x, w, b):
        return jnp.sum(jnp.sin(linear(x, w, dims, contract=contract, bias=b)))

    def plain(x, w, b):
        return jnp.sum(jnp.sin(jnp.tensordot(x, w, contract) + b))

    want = (jnp.tensordot(x, w, contract) + b, jax.grad(plain, (0, 1, 2))(x, w, b))
    with use(preset("zero3+megatron", mesh=mesh).bind(devices)):
        value = jax.jit(lambda *a: linear(a[0], a[1], dims, contract=contract, bias=a[2]))(x, w, b)
        got = (value, jax.jit(jax.grad(through, (0, 1, 2)))(x, w, b))
    assert_trees_close(got, want)


def test_linear_refuses_shapes_that_do_not_meet():
    with pytest.raises(ValueError, match="they must be equal"):
        linear(jnp.ones((2, 3)), jnp.ones((4, 5)), ("embed", "mlp"))


def test_weights_are_gathered_in_the_compute_dtype_and_gradients_scattered(devices):
    plan = preset("zero3", mesh={"fsdp": 8}, precision=Precision(compute="bfloat16"))
    w = jnp.ones((16, 8))

    def f(w):
        return gather_weight(w, ("embed", "mlp"))

    with use(plan.bind(devices)):
        gathered = jax.jit(f)(w)
        grad = jax.jit(jax.grad(lambda w: f(w).astype(jnp.float32).sum()))(w)
    assert gathered.dtype == jnp.bfloat16
    assert gathered.sharding.is_fully_replicated
    assert grad.dtype == jnp.float32
    assert grad.sharding.spec == P("fsdp")
