"""Rows of stacked arrays, on the device or in host memory, inside a traced program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(x: Any) -> bool:
    """Whether an array lives in host memory."""
    return jax.typeof(x).memory_space == HOST


def to_device(x: Array) -> Array:
    """The array in device memory."""
    return jax.device_put(x, DEVICE) if on_host(x) else x


def to_host(x: Array) -> Array:
    """The array in host memory."""
    return x if on_host(x) else jax.device_put(x, HOST)


def fetch(stacks: Any, row: Any, *, stacked: bool = True, axis: int = 0) -> Any:
    """Row `row` of each array along `axis`, on the device; arrays that are no stacks whole."""

    def one(stack: Array) -> Array:
        if stacked:
            stack = jax.lax.dynamic_index_in_dim(stack, row, axis, keepdims=False)
        return to_device(stack)

    return jax.tree.map(one, stacks)


def store(stacks: Any, rows: Any, row: Any, *, stacked: bool = True, axis: int = 0) -> Any:
    """The stacks with row `row` replaced, each where it lives: carried through a loop, in place.

    Leaf by leaf: the copy of one starts while the next is still computed.
    """

    def one(stack: Array, value: Array) -> Array:
        value = to_host(value) if on_host(stack) else to_device(value)
        if not stacked:
            return value
        return jax.lax.dynamic_update_index_in_dim(stack, value, row, axis)

    return jax.tree.map(one, stacks, rows)


def new_stack(
    count: int,
    row: Any,
    *,
    host: bool,
    stacked: bool = True,
    sharding: NamedSharding | None = None,
    axis: int = 0,
) -> Array:
    """An array for `count` rows like `row`; what it holds before rows are stored is undefined.

    Args:
        count: Rows.
        row: Its shape and dtype.
        host: Whether it lives in host memory.
        stacked: Whether it gets a dim of rows; else it is one row itself.
        sharding: Of a row. Needed where several devices hold parts of one in host memory.
        axis: Where the dim of rows stands.

    Cost: no device memory and no copy for what lives in host memory.
    """

    def with_rows(dims: Sequence[Any], rows: Any) -> tuple[Any, ...]:
        return (*dims[:axis], rows, *dims[axis:]) if stacked else tuple(dims)

    shape = with_rows(row.shape, count)
    if not host:
        return jnp.zeros(shape, row.dtype)
    if sharding is None or sharding.mesh.size == 1:
        return jax.device_put(jax.lax.empty(shape, row.dtype), HOST)
    # Left to the partitioner, an empty array is made whole on every device and then sent.
    local = with_rows(sharding.shard_shape(tuple(row.shape)), count)
    spec = (*sharding.spec, *[None] * (len(row.shape) - len(sharding.spec)))
    make = jax.shard_map(
        lambda: jax.lax.empty(local, row.dtype),
        mesh=sharding.mesh,
        in_specs=(),
        out_specs=PartitionSpec(*with_rows(spec, None)),
        check_vma=False,
    )
    return jax.device_put(make(), HOST)


def build_stack(
    make_row: Callable[[Any], Any],
    count: int,
    hosts: Any,
    shardings: Any = None,
    *,
    axis: int = 0,
) -> Any:
    """`make_row(i)` of every row, made one after another and stored where it belongs.

    Args:
        make_row: Row number to a tree of arrays.
        count: Rows.
        hosts: Tree of booleans, whether a leaf's stack lives in host memory.
        shardings: Tree of shardings of a row; None on a single device.
        axis: Where the dim of rows stands.

    Cost: device memory for two rows of what lives in host memory, however many there are.
    """
    shapes = jax.eval_shape(make_row, jax.ShapeDtypeStruct((), jnp.int32))
    leaves, structure = jax.tree.flatten(shapes)
    where = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    stacks = jax.tree.unflatten(
        structure,
        [
            new_stack(count, row, host=host, sharding=sharding, axis=axis)
            for row, host, sharding in zip(leaves, jax.tree.leaves(hosts), where, strict=True)
        ],
    )

    def step(i: Any, stacks: Any) -> Any:
        rows = make_row(i)
        if shardings is not None:
            rows = jax.tree.map(jax.lax.with_sharding_constraint, rows, shardings)
        return store(stacks, rows, i, axis=axis)

    return jax.lax.fori_loop(0, count, step, stacks)
