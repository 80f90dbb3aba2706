"""Values inside `shard_map` carry the mesh axes along which they may differ; loops check it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.compat import varying_axes


def vary_alike(tree: Any) -> Any:
    """All leaves marked as different along every mesh axis that any of them differs along.

    Loop carries and hand-written gradients must agree in this with what they are added to. The
    transpose sums gradients of leaves that were equal on all devices. Outside `shard_map` it does
    nothing.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def varies(tree: Any) -> bool:
    """Whether any leaf is marked as different along a mesh axis; a mere shape is not."""
    return any(varying_axes(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def zeros_like_varying(shape: tuple[int, ...], like: Array) -> Float[Array, "..."]:
    """Float32 zeros that may differ along the same mesh axes as `like`: a loop's first carry."""
    axes = tuple(sorted(varying_axes(like)))
    zeros = jnp.zeros(shape, jnp.float32)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def zeros_after(x: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Float32 zeros that take no memory before `x` is there, and vary as it does.

    Zeros that depend on nothing may be made far ahead of the sum that starts with them, such as in
    front of a stage's layers, to fill the wait for a transfer. That these are zeros is not known
    before the last step of compilation, within the kernel that writes them.

    Args:
        x: Of any floating dtype; its dims are the first of `shape`, or 1.
        shape: Of the zeros.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    zeros = jnp.where((bits | 1) == 0, jnp.float32(1), jnp.float32(0))
    return jnp.broadcast_to(jnp.expand_dims(zeros, tuple(range(x.ndim, len(shape)))), shape)
