"""Stacks in host and device memory: made, filled and read row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.offload import build_stack, fetch, new_stack, on_host, store

COUNT, SHAPE = 3, (8, 4)


def sharding(devices):
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def placed(devices, *, host):
    own = sharding(devices)
    kind = "pinned_host" if host else "device"
    return NamedSharding(own.mesh, PartitionSpec(None, *own.spec), memory_kind=kind)


def row(i):
    return {"w": jnp.arange(32.0).reshape(SHAPE) + 100.0 * i, "b": jnp.full(8, i, jnp.float32)}


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("count", [1, 8])
def test_a_stack_is_made_row_by_row_where_it_lives(devices, count, host):
    found = devices[:count]
    own = None if count == 1 else {"w": sharding(found), "b": sharding(found)}
    where = {"w": placed(found, host=host), "b": placed(found, host=False)}
    make = jax.jit(
        lambda: build_stack(row, COUNT, {"w": host, "b": False}, own), out_shardings=where
    )
    stacks = make()
    for name, stack in stacks.items():
        assert stack.sharding.memory_kind == where[name].memory_kind
        assert stack.sharding.is_equivalent_to(where[name], stack.ndim)
        wanted = np.stack([np.asarray(row(i)[name]) for i in range(COUNT)])
        np.testing.assert_array_equal(np.asarray(stack), wanted)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("count", [1, 8])
def test_rows_are_stored_and_fetched(devices, count, host, stacked):
    found = devices[:count]
    own = None if count == 1 else sharding(found)

    @jax.jit
    def run(value):
        like = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
        stack = new_stack(COUNT, like, host=host, stacked=stacked, sharding=own)
        assert stack.shape == ((COUNT, *SHAPE) if stacked else SHAPE)
        assert stack.dtype == jnp.bfloat16
        assert on_host(stack) == host
        for i in range(COUNT):
            stack = store(stack, (value + i).astype(jnp.bfloat16), i, stacked=stacked)
            assert on_host(stack) == host
        rows = [fetch(stack, i, stacked=stacked) for i in range(COUNT)]
        assert not any(on_host(r) for r in rows)
        return rows

    value = jnp.arange(32.0).reshape(SHAPE)
    for i, got in enumerate(run(value)):
        last = i if stacked else COUNT - 1
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(value) + last)


def test_a_row_of_another_dtype_is_not_stored_silently():
    stack = jnp.zeros((COUNT, *SHAPE), jnp.bfloat16)
    with pytest.raises(TypeError):
        store(stack, jnp.ones(SHAPE, jnp.float32), 0)
