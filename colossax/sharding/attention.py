"""Attention under a plan: the local kernel inside a region manual over the whole mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.pallas.attention import Mask
from colossax.pallas.attention import attention as local_attention
from colossax.sharding.context import current
from colossax.sharding.rules import resolve


def attention(
    q: Float[Array, "b s n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k hv"],
    *,
    mask: Mask,
    biases: Sequence[Array] = (),
    alibi_slopes: Float[Array, " n"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " n"] | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact softmax attention, batch and heads split as the plan in force says.

    Arguments and result are those of `colossax.pallas.attention.attention`. Where there are fewer
    kv heads than devices on the heads' axes, every device holds them all and reads its own.

    Cost: no communication forward; backward sums the gradient of replicated kv heads.

    Raises:
        PlanError: Heads or batch are not a multiple of their axes.
        ValueError: Shapes contradict one another.
    """
    bound = current()
    kernel = "auto" if bound is None else bound.plan.attention.kernel
    options = {
        "scale": scale,
        "soft_cap": soft_cap,
        "return_lse": return_lse,
        "implementation": kernel,
    }
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "biases": tuple(biases),
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    if bound is None or bound.single:
        return _local(arrays, options)
    specs = _specs(bound, arrays)
    out_spec: Any = specs["q"]
    if return_lse:
        out_spec = (out_spec, PartitionSpec(specs["q"][0], specs["q"][2], None))

    def island_local(local: dict[str, Any]) -> Any:
        heads = specs["q"][2]
        if heads is not None and specs["k"][2] is None:
            local = _own_kv_heads_local(bound, heads, q.shape[2], local)
        return _local(local, options)

    # Unchecked, gradients of operands that are whole on several devices are summed over those, and
    # the island can stand under `vmap` over devices, where the check fails on what it batches.
    mapped = jax.shard_map(
        island_local, mesh=bound.mesh, in_specs=(specs,), out_specs=out_spec, check_vma=False
    )
    return mapped(arrays)


def _local(arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    arrays = dict(arrays)
    q, k, v = arrays.pop("q"), arrays.pop("k"), arrays.pop("v")
    try:
        return local_attention(q, k, v, **arrays, **options)
    except NotImplementedError as reason:
        raise PlanError(f"plan.attention.kernel: {reason}; use 'auto'") from reason


def _specs(bound: BoundPlan, arrays: dict[str, Any]) -> dict[str, Any]:
    q_dims = ("batch:inner", None, "heads", None)
    kv_dims = ("batch:inner", None, "kv_heads", None)
    spec_of = {
        name: resolve(bound, "activations", dims, arrays[name].shape, name=f"attention {name}")
        for name, dims in (("q", q_dims), ("k", kv_dims), ("v", kv_dims))
    }
    batch, heads = spec_of["q"][0], spec_of["q"][2]

    def of_mask(x: Array) -> PartitionSpec:
        return PartitionSpec(None if x.shape[0] == 1 else batch, *[None] * (x.ndim - 1))

    def of_bias(x: Array) -> PartitionSpec:
        by_dim = [batch, heads, None, None]
        return PartitionSpec(*[None if n == 1 else s for n, s in zip(x.shape, by_dim, strict=True)])

    return {
        **spec_of,
        "mask": jax.tree.map(of_mask, arrays["mask"]),
        "biases": jax.tree.map(of_bias, arrays["biases"]),
        "alibi_slopes": jax.tree.map(lambda _: PartitionSpec(heads), arrays["alibi_slopes"]),
        "sinks": jax.tree.map(lambda _: PartitionSpec(heads), arrays["sinks"]),
    }


def _own_kv_heads_local(
    bound: BoundPlan, heads_axes: str | tuple[str, ...], heads: int, local: dict[str, Any]
) -> dict[str, Any]:
    """Of replicated kv heads, those that this device's query heads read."""
    axes = (heads_axes,) if isinstance(heads_axes, str) else heads_axes
    here = heads // bound.size(axes)
    kv_heads = local["k"].shape[2]
    group = heads // kv_heads
    first = jax.lax.axis_index(axes) * here
    aligned = here % group == 0 or group % here == 0

    def own(x: Array) -> Array:
        if aligned:
            return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, here // group), axis=2)
        # The groups of query heads do not line up with the devices: one kv head per query head.
        return jnp.take(x, (first + jnp.arange(here)) // group, axis=2)

    return {**local, "k": own(local["k"]), "v": own(local["v"])}
