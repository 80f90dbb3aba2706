"""Experts that stay in host memory, of which the device fetches those that tokens choose."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.errors import PlanError
from colossax.sharding.experts.island import (
    Compute,
    LocalExperts,
    cast,
    home_local,
    mapped,
    rest_specs,
    token_spec,
    tokens_local,
)
from colossax.sharding.experts.layout import Layout
from colossax.sharding.matmul.splits import move_local, spec_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def in_host_memory(x: Any) -> bool:
    """Whether an array, or what is traced in its place, lives there."""
    return jax.typeof(x).memory_space == _HOST


def through_chosen(
    layout: Layout,
    compute: Compute,
    x: Float[Array, "b s d"],
    weights: Mapping[str, Array],
    layer: Any,
    expert: Int[Array, "b s k"],
    scale: Float[Array, "b s k"],
) -> Float[Array, "b s d"]:
    """What the experts chosen for each token return, summed by their weights, without gradients.

    Args:
        layout: Where everything lies; nothing is sent.
        compute: What experts do with rows.
        x: In the compute dtype.
        weights: Of all experts of a layer; those in host memory may have a dim of layers in front.
        layer: Number among those, int32; None where there is one without the dim.
        expert: Numbers of the chosen; one that is none's is no choice.
        scale: Weights of the chosen, float32.

    Raises:
        PlanError: A device computes with experts that other devices have in host memory.

    Cost: per device, of its experts those that any token chooses, fetched once and one after
    another; two of them on the device. Every token is multiplied by each. One sum of the results
    over the group, and over other axes that split the experts' features a gather of each expert.
    """
    for name, splits in layout.weights.items():
        if splits.rest[0] != splits.held[0]:
            raise PlanError(
                f"experts {name}: their group is {','.join(splits.held[0]) or 'none'}, and in host"
                f" memory they are split over {','.join(splits.rest[0]) or 'none'}; let"
                " plan.rules.params give dim 'experts' the axes of the group, or keep experts on"
                " the devices"
            )

    together = _gathered(layout)
    stacked = {name for name, x in weights.items() if layer is not None and in_host_memory(x)}

    def local(x: Array, weights: Any, layer: Any, expert: Array, scale: Array) -> Array:
        tokens, chosen, scales = tokens_local(layout, x, expert, scale)
        ids, count = _chosen_local(chosen, layout.experts_here, together)

        def one(number: Any, total: Array) -> Array:
            each = ids[number]
            at = {name: (layer, each) if name in stacked else (each,) for name in weights}
            held = _expert_local(layout, weights, at, x.dtype)
            mine = chosen == each
            weight = jnp.sum(jnp.where(mine, scales, 0), axis=-1)
            local = LocalExperts(
                arrays=held,
                gradients={},
                sizes=jnp.full((1,), len(tokens), jnp.int32),
                share=layout.size(layout.features),
            )
            rows = compute(local, tokens, weight).astype(jnp.float32)
            return total + jnp.where(jnp.any(mine, axis=-1)[:, None], rows, 0)

        total = jax.lax.fori_loop(0, count, one, jnp.zeros(tokens.shape, jnp.float32))
        return home_local(layout, total, x)

    rest = {
        name: jax.sharding.PartitionSpec(None, *spec) if name in stacked else spec
        for name, spec in rest_specs(layout).items()
    }
    tokens = token_spec(layout)
    run = mapped(layout, local, (tokens, rest, spec_of(()), tokens, tokens), tokens)
    return run(x, dict(weights), layer, expert, scale)


def _gathered(layout: Layout) -> tuple[str, ...]:
    """Axes along which the parts of an expert are gathered."""
    axes = [
        axis
        for splits in layout.weights.values()
        for rest, held in zip(splits.rest[1:], splits.held[1:], strict=True)
        for axis in rest[len(held) :]
    ]
    return tuple(dict.fromkeys(axes))


def _chosen_local(
    chosen: Int[Array, "t k"], here: int, together: tuple[str, ...]
) -> tuple[Array, Array]:
    """Numbers of the experts here that any token chooses, ascending, and how many they are.

    Any token of the devices that gather an expert together: they must be in the same turn.
    """
    mine = (chosen >= 0) & (chosen < here)
    used = jnp.zeros((here,), jnp.int32).at[jnp.where(mine, chosen, here)].set(1, mode="drop")
    if together:
        used = jax.lax.pmax(used, together)
    return jnp.nonzero(used, size=here, fill_value=0)[0], jnp.sum(used)


def _expert_local(
    layout: Layout, weights: Mapping[str, Array], at: Mapping[str, tuple], dtype: Any
) -> dict[str, Array]:
    """One expert on the device, `[1, ...]`, as it is multiplied; `at` has its place in each."""
    held = {}
    for name, stack in weights.items():
        place = at[name]
        rest = stack.shape[len(place) :]
        start = (*place, *[jnp.int32(0)] * len(rest))
        row = jax.lax.dynamic_slice(stack, start, (*[1] * len(place), *rest))
        row = cast(weights, name, dtype, jax.device_put(row.reshape(1, *rest), _DEVICE))
        splits = layout.weights[name]
        held[name] = move_local(row, ((), *splits.rest[1:]), ((), *splits.held[1:]))
    return held
