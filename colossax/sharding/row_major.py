"""The order of dims in memory, where the compiler is not left to choose it.

Collectives on GPUs want the dim along which they gather or scatter outermost. The compiler hands
that wish on to where an array comes from: for a layer's weight that is the whole stack, which it
then copies into the other order in front of the loop over the layers, and its gradients behind it.
Held in order, each layer is turned by itself, in the cast that it goes through anyway.
"""

import functools

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.sharding.rules import resolve
from colossax.typing import Dims


def as_in_stack(bound: BoundPlan, role: str, dims: Dims, x: Array) -> Array:
    """A layer's parameter or gradient, in memory as the stack it is of: last dim innermost.

    Args:
        bound: Plan and mesh.
        role: As which it lies: a role of `resolve` that differs from `weights` where `x` is about
            to be gathered, or was scattered.
        dims: Its logical dims, without `layers`.
        x: Of a layer.

    Cost: nothing where only dim 0 is gathered or scattered.
    """
    name = f"weight {dims}"
    here, whole = (resolve(bound, each, dims, x.shape, name=name) for each in (role, "weights"))
    return x if here[1:] == whole[1:] else row_major(bound, here, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def row_major(bound: BoundPlan, spec: PartitionSpec, x: Array) -> Array:
    """`x`, split like this, with its last dim innermost in the memory of every device.

    So is its gradient.
    """
    # In a region of our own: the partitioner would gather whatever it finds held in an order.
    held = jax.shard_map(
        row_major_local, mesh=bound.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return held(x)


def _row_major_fwd(bound: BoundPlan, spec: PartitionSpec, x: Array):
    return row_major(bound, spec, x), None


def _row_major_bwd(bound: BoundPlan, spec: PartitionSpec, _: None, dx: Array):
    return (row_major(bound, spec, dx),)


row_major.defvjp(_row_major_fwd, _row_major_bwd)


def row_major_local(x: Array) -> Array:
    """`x` with its last dim innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
