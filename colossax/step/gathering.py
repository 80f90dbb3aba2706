"""New parameters, accepted or not, on their way from their update to where they are kept."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from colossax.config import BoundPlan
from colossax.sharding import current, resolve
from colossax.sharding.row_major import row_major
from colossax.typing import ParamInfo, Params


def accepted(infos: Any, finite: Bool[Array, ""], new: Params, old: Params) -> Params:
    """`new` where `finite`, else `old`, laid out as the plan in force keeps parameters.

    Where the optimizer's state is split further than the parameters (zero1, zero2), each device
    has updated its part, and the parts are gathered: those of a stack layer by layer, into the
    memory of the old one. Gathered all at once they would stand beside it.

    Args:
        infos: Of all parameters.
        finite: Whether loss and gradients are.
        new: What is the same array as in `old` is left as it is.
        old: As they were.

    Cost: what is gathered is sent once; memory for the parts, one layer, and what is in no stack.
    """
    chosen = jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), new, old)
    bound = current()
    return chosen if bound is None or bound.single else _gathered(bound, infos, chosen, old)


def _gathered(bound: BoundPlan, infos: Any, new: Params, old: Params) -> Params:
    described, structure = jax.tree.flatten(infos)
    leaves, before = jax.tree.leaves(new), jax.tree.leaves(old)
    stacks: dict[int, list[int]] = {}
    for at, (info, leaf, was) in enumerate(zip(described, leaves, before, strict=True)):
        made, kept = _made_and_kept(bound, info)
        if leaf is was or made == kept:
            continue
        leaves[at] = _laid(bound, made, leaf)
        if info.stacked and made[0] is None and kept[0] is None:
            stacks.setdefault(info.shape[0], []).append(at)
    for places in stacks.values():
        moving = [described[at] for at in places]
        shards, stores = ([tree[at] for at in places] for tree in (leaves, before))
        for at, leaf in zip(places, _by_layer(bound, moving, shards, stores), strict=True):
            leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)


def _made_and_kept(bound: BoundPlan, info: ParamInfo) -> tuple[PartitionSpec, PartitionSpec]:
    """Where a parameter's update is computed, and where it lies between steps."""
    made = resolve(bound, "optimizer", info.dims, info.shape, name=info.path)
    return made, resolve(bound, "params", info.dims, info.shape, name=info.path)


def _by_layer(
    bound: BoundPlan, infos: Sequence[ParamInfo], shards: list[Array], stores: list[Array]
) -> list[Array]:
    """Stacks of as many layers, gathered one layer after another into their stores."""
    specs = [_made_and_kept(bound, info) for info in infos]

    def gather(layer: Any, shard: Array, made: PartitionSpec, kept: PartitionSpec) -> Array:
        row = jax.lax.dynamic_index_in_dim(shard, layer, 0, keepdims=False)
        if made[2:] == kept[2:]:
            return _laid(bound, _rest(kept), row)
        # Else stacks would be turned whole for the gather, at both of its ends.
        row = _laid(bound, _rest(kept), row_major(bound, _rest(made), row))
        return row_major(bound, _rest(kept), row)

    def body(layer: Any, stores: list[Array]) -> list[Array]:
        rows = [gather(layer, shard, *spec) for shard, spec in zip(shards, specs, strict=True)]
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
        return [put(store, row) for store, row in zip(stores, rows, strict=True)]

    return jax.lax.fori_loop(0, infos[0].shape[0], body, stores)


def _laid(bound: BoundPlan, spec: PartitionSpec, x: Array) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def _rest(spec: PartitionSpec) -> PartitionSpec:
    """Of a layer's part of a stack."""
    return PartitionSpec(*spec[1:])
