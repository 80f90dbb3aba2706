"""Arithmetic on host memory in traced programs: each form is found, data movement is not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.aot import host_arithmetic

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
STACK = (4, 8)


@pytest.fixture
def stack(devices) -> jax.ShapeDtypeStruct:
    mesh = Mesh(devices[:1], ("fsdp",), axis_types=(AxisType.Auto,))
    on_host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(STACK, "float32", sharding=on_host)


def found(function, *arguments) -> list[str]:
    return host_arithmetic(jax.jit(function).trace(*arguments).jaxpr)


def streamed(stack):
    """One layer at a time to the device, doubled, and back."""

    def body(i, stack):
        row = jax.lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)
        new = jax.device_put(2 * jax.device_put(row, DEVICE), HOST)
        return jax.lax.dynamic_update_index_in_dim(stack, new, i, 0)

    return jax.lax.fori_loop(0, STACK[0], body, stack)


@jax.custom_vjp
def overwriting(stack, x):
    return x


def _forward(stack, x):
    return x, stack


def _backward(stack, dx):
    return streamed(stack), dx


overwriting.defvjp(_forward, _backward)


def scaled_forward(stack):
    return 2 * stack


CLEAN = {
    "carried": streamed,
    "scanned": lambda s: jax.lax.scan(
        lambda c, row: (c, jax.device_put(jax.device_put(row, DEVICE) + 1, HOST)), 0, s
    )[1],
    "sliced": lambda s: jax.device_put(s[1:3].reshape(16)[None], DEVICE) * 2,
    "checkpointed": jax.checkpoint(streamed),
    "overwritten with gradients": lambda s: jax.grad(lambda s: overwriting(s, jnp.ones(3)).sum())(
        s
    ),
    "branches": lambda s: jax.lax.cond(jnp.array(True), streamed, lambda s: s, s),
    "never filled": lambda s: jax.lax.dynamic_update_index_in_dim(
        jax.device_put(jax.lax.empty(STACK, "float32"), HOST), s[0], 1, 0
    ),
}

DIRTY = {
    "scaled": (scaled_forward, "mul"),
    "in a loop": (lambda s: jax.lax.fori_loop(0, 4, lambda i, s: -s, s), "neg"),
    "in a scan": (lambda s: jax.lax.scan(lambda c, row: (c, row + row), 0, s)[1], "add"),
    "in a branch": (lambda s: jax.lax.cond(jnp.array(True), jnp.exp, lambda s: s, s), "exp"),
    "under a checkpoint": (jax.checkpoint(jnp.sin), "sin"),
    "cast": (lambda s: s.astype(jnp.bfloat16), "convert_element_type"),
    "transposed": (lambda s: s.T, "transpose"),
    "concatenated": (lambda s: jnp.concatenate([s, s]), "concatenate"),
    "summed": (lambda s: jax.device_put(s.sum(), DEVICE), "reduce_sum"),
    "broadcast": (lambda s: jnp.broadcast_to(s[0, 0], STACK), "broadcast_in_dim"),
    "selected": (lambda s: jnp.where(jnp.array(True), s, s), "select_n"),
    "two gradients of one stack": (
        lambda s: jax.grad(
            lambda s: overwriting(s, jnp.ones(3)).sum() + overwriting(s, jnp.ones(3)).sum()
        )(s),
        "add_any",
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_data_movement_is_allowed(name, stack):
    assert found(CLEAN[name], stack) == []


@pytest.mark.parametrize("name", DIRTY)
def test_everything_else_is_named(name, stack):
    function, primitive = DIRTY[name]
    sentences = found(function, stack)
    assert sentences
    assert any(one.startswith(f"{primitive} on float32<host>") for one in sentences)


def test_the_sentence_says_where_and_what_to_do(stack):
    (sentence,) = found(scaled_forward, stack)
    assert "float32<host>[4,8] computes in host memory at " in sentence
    assert "test_host_arithmetic.py:" in sentence
    assert sentence.endswith("jax.device_put(..., jax.memory.Space.Device) first")


def test_the_device_may_compute(devices):
    mesh = Mesh(devices[:1], ("fsdp",), axis_types=(AxisType.Auto,))
    on_device = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct(STACK, "float32", sharding=on_device)
    assert found(lambda x: jnp.sin(2 * x).sum(), x) == []
    assert host_arithmetic(jax.make_jaxpr(lambda x: 2 * x)(1.0)) == []
