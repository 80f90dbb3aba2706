"""Tokens to their experts and back, in a region manual over the whole mesh.

Nothing here is left to the compiler's partitioner. The rule for derivatives stands outside of the
regions, so that no gradient is summed twice. What a buffer cannot take at once goes in further
passes: a loop whose length all devices agree on, in backward as in forward, so that no routing
takes more memory than another and none drops a token.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.grouped_matmul import grouped_matmul
from colossax.sharding.experts.layout import Layout
from colossax.sharding.experts.slots import (
    Slots,
    Sorted,
    by_expert,
    collect,
    permuted,
    rows_per_device,
    slots_of,
    sort_choices,
    spread,
    spread_choices,
)
from colossax.sharding.matmul.splits import move_local, spec_of
from colossax.sharding.row_major import row_major_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """A device's experts, while they compute on rows.

    Attributes:
        arrays: By name, `[l, ...]`, in the dtype of the rows.
        gradients: Zeros of their shapes in the dtype of sums, which are differentiated in their
            place; none where nothing is.
        sizes: `[l]`, rows of each expert; they come one expert after another.
        share: Devices that split the hidden features, each of which has all outputs.
    """

    arrays: Mapping[str, Array]
    gradients: Mapping[str, Array]
    sizes: Int[Array, " l"]
    share: int

    def times(self, rows: Float[Array, "r d"], name: str) -> Float[Array, "r f"]:
        """Each row times the matrix of its expert."""
        into = self.gradients.get(name)
        return grouped_matmul(rows, self.arrays[name], self.sizes, gradient_into=into)

    def of_rows(self, name: str, rows: int) -> Float[Array, "r f"]:
        """The vector of each row's expert; of none behind the last expert's rows, zeros."""
        vectors, into = self.arrays[name], self.gradients.get(name)
        if into is not None:
            vectors = vectors + into.astype(vectors.dtype)  # zeros
        ends = jnp.cumsum(self.sizes)
        number = jnp.searchsorted(ends, jnp.arange(rows), side="right")
        return vectors.at[number].get(mode="fill", fill_value=0)


Compute = Callable[[LocalExperts, Float[Array, "r d"], Float[Array, " r"]], Float[Array, "r d"]]
"""`(experts, rows, weights of the rows) -> rows`: what experts do, weights applied. Hashable."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def through_experts(
    layout: Layout,
    compute: Compute,
    x: Float[Array, "b s d"],
    weights: Mapping[str, Array],
    expert: Int[Array, "b s k"],
    scale: Float[Array, "b s k"],
) -> tuple[Float[Array, "b s d"], Float[Array, ""], Float[Array, ""]]:
    """What the experts chosen for each token return, summed by their weights.

    Args:
        layout: Where everything lies.
        compute: What experts do with rows.
        x: In the compute dtype.
        weights: Of all experts, at rest.
        expert: Numbers of the chosen; one that is none's is no choice.
        scale: Weights of the chosen, float32.

    Returns:
        As x; how many passes it took; how many choices were dropped, on all devices.

    Cost: per device and pass, for `passes` and `capacity`: 2 `(e - 1) / e` of e buffers of
    `slots` rows by all-to-all forward and as much backward, with the rows sent once more; over axes
    of features each buffer is gathered and reduce-scattered. `gather`: the group's tokens gathered
    once and reduce-scattered once, each way. Backward repeats what forward sent, and keeps x alone.
    """
    return _forward(layout, compute, x, weights, expert, scale)


def _forward(
    layout: Layout, compute: Compute, x: Array, weights: Any, expert: Array, scale: Array
) -> tuple[Array, Array, Array]:
    def forward_local(x: Array, weights: Any, expert: Array, scale: Array) -> Any:
        held = _held_local(layout, weights, x.dtype)
        tokens, chosen, scales = tokens_local(layout, x, expert, scale)
        found = sort_choices(chosen, _sorted_experts(layout))
        count = _passes_local(layout, found)

        def one(number: Array | int, total: Array) -> Array:
            taken = slots_of(found, layout.destinations, layout.slots, number)
            return total + _pass_local(layout, compute, held, {}, tokens, scales, taken)

        total = jnp.zeros(tokens.shape, jnp.float32)
        total = _repeated(layout, count, one, total)
        count = count.astype(jnp.float32)
        return home_local(layout, total, x), count, _dropped_local(layout, found)

    whole = spec_of(())
    run = mapped(
        layout,
        forward_local,
        (token_spec(layout), rest_specs(layout), token_spec(layout), token_spec(layout)),
        (token_spec(layout), whole, whole),
    )
    return run(x, weights, expert, scale)


def _fwd(
    layout: Layout, compute: Compute, x: Array, weights: Any, expert: Array, scale: Array
) -> tuple[Any, Any]:
    return _forward(layout, compute, x, weights, expert, scale), (x, weights, expert, scale)


def _bwd(layout: Layout, compute: Compute, residuals: Any, cotangents: Any) -> Any:
    x, weights, expert, scale = residuals

    def backward_local(x: Array, weights: Any, expert: Array, scale: Array, dy: Array) -> Any:
        held = _held_local(layout, weights, x.dtype)
        tokens, chosen, scales = tokens_local(layout, x, expert, scale)
        dtokens = _gathered_local(layout, _slice_local(layout, _flat(dy))).astype(jnp.float32)
        found = sort_choices(chosen, _sorted_experts(layout))

        def one(number: Array | int, totals: Any) -> Any:
            taken = slots_of(found, layout.destinations, layout.slots, number)
            into = {name: jnp.zeros(w.shape, layout.summed) for name, w in held.items()}

            def differentiated(into: Any, tokens: Array, scales: Array) -> Array:
                return _pass_local(layout, compute, held, into, tokens, scales, taken)

            _, pull = jax.vjp(differentiated, into, tokens, scales)
            dheld, dx, dscale = pull(dtokens)
            return jax.tree.map(jnp.add, totals, (dheld, dx.astype(jnp.float32), dscale))

        zeros = (
            {name: jnp.zeros(w.shape, layout.summed) for name, w in held.items()},
            jnp.zeros(tokens.shape, jnp.float32),
            jnp.zeros(scales.shape, jnp.float32),
        )
        count = _passes_local(layout, found)
        dheld, dx, dscale = _repeated(layout, count, one, zeros)
        dweights = {
            name: _summed_local(layout, name, dw).astype(weights[name].dtype)
            for name, dw in dheld.items()
        }
        return home_local(layout, dx, x), dweights, home_local(layout, dscale, scale)

    tokens = token_spec(layout)
    grads = {name: spec_of(splits.grad) for name, splits in layout.weights.items()}
    run = mapped(
        layout,
        backward_local,
        (tokens, rest_specs(layout), tokens, tokens, tokens),
        (tokens, grads, tokens),
    )
    dx, dweights, dscale = run(x, weights, expert, scale, cotangents[0])
    return dx, dweights, None, dscale


through_experts.defvjp(_fwd, _bwd)


def _pass_local(
    layout: Layout,
    compute: Compute,
    held: Mapping[str, Array],
    into: Mapping[str, Array],
    tokens: Array,
    scales: Array,
    taken: Slots,
) -> Array:
    """What this pass's choices return to the tokens here, `[t, d]` float32."""
    rows, weight = spread(tokens, taken), spread_choices(scales, taken)
    counts = taken.counts
    if layout.sends:
        rows, weight, counts = (
            _exchanged_local(layout, each) for each in (rows, weight, taken.counts.ravel())
        )
        if layout.features:
            rows, weight, counts = (
                jax.lax.all_gather(each, layout.features, tiled=True)
                for each in (rows, weight, counts)
            )
        counts = counts.reshape(-1, layout.experts_here)
    order = by_expert(counts, layout.slots)
    if len(counts) > 1:
        rows, weight = (permuted(each, order.source, order.place) for each in (rows, weight))
    share = layout.size(layout.features)
    local = LocalExperts(arrays=held, gradients=into, sizes=order.sizes, share=share)
    rows = compute(local, rows, weight)
    if len(counts) > 1:
        rows = permuted(rows, order.place, order.source)
    if layout.sends:
        if layout.features:
            rows = jax.lax.psum_scatter(rows, layout.features, tiled=True)
        rows = _exchanged_local(layout, rows)
    return collect(rows, taken)


def _exchanged_local(layout: Layout, x: Array) -> Array:
    """Of each device of the group its part of dim 0, in their order."""
    if layout.destinations == 1:
        return x
    return jax.lax.all_to_all(x, layout.group, split_axis=0, concat_axis=0, tiled=True)


def _repeated(layout: Layout, count: Array, one: Callable, start: Any) -> Any:
    """`one` for each pass, one after another."""
    if layout.passes == 1:
        return one(0, start)

    def body(carry: Any) -> Any:
        number, totals = carry
        return number + 1, one(number, totals)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), start))[1]


def _passes_local(layout: Layout, found: Sorted) -> Array:
    """How many all devices take: as many as the fullest, on any of them."""
    if layout.passes == 1:
        return jnp.int32(1)
    rows = jnp.max(rows_per_device(found, layout.destinations))
    needed = -(-rows // layout.slots)
    assert layout.bound is not None
    return jax.lax.pmax(needed, layout.bound.mesh.axis_names)


def _dropped_local(layout: Layout, found: Sorted) -> Array:
    """Choices that no pass takes, on all devices."""
    if layout.way != "capacity" or layout.bound is None:
        return jnp.float32(0)
    over = rows_per_device(found, layout.destinations) - layout.slots
    sent = (*layout.tokens[0], *layout.tokens[1], *layout.sliced)
    return jax.lax.psum(jnp.sum(jnp.maximum(over, 0)).astype(jnp.float32), sent)


def _sorted_experts(layout: Layout) -> int:
    """Experts by which the choices here are sorted."""
    return layout.experts if layout.sends else layout.experts_here


def tokens_local(
    layout: Layout, x: Array, expert: Array, scale: Array
) -> tuple[Array, Array, Array]:
    """The tokens that this device sends or computes, their experts and weights."""
    # Numbers of experts from 1: what fills up a slice is nobody's.
    tokens, chosen, scales = (
        _gathered_local(layout, _slice_local(layout, _flat(each)))
        for each in (x, expert + 1, scale)
    )
    chosen = chosen - 1
    if not layout.sends and layout.group:
        chosen = chosen - jax.lax.axis_index(layout.group) * layout.experts_here
    return tokens, chosen, scales


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _slice_local(layout: Layout, x: Array) -> Array:
    """This device's part of tokens that lie whole along some axes."""
    if not layout.sliced:
        return x
    size = layout.here
    x = jnp.pad(x, ((0, size * layout.size(layout.sliced) - x.shape[0]), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(layout.sliced) * size, size)


def _gathered_local(layout: Layout, x: Array) -> Array:
    """The tokens of all devices that are to compute on them."""
    return jax.lax.all_gather(x, layout.gathered, tiled=True) if layout.gathered else x


def home_local(layout: Layout, x: Array, like: Array) -> Array:
    """What was computed for tokens, summed up, where they are at rest."""
    x = x.astype(like.dtype)
    if layout.gathered:
        x = jax.lax.psum_scatter(x, layout.gathered, tiled=True)
    if layout.partial:
        x = jax.lax.psum(x, layout.partial)
    if layout.sliced:
        x = jax.lax.all_gather(x, layout.sliced, tiled=True)
        x = x[: like.size // like.shape[-1]]
    return x.reshape(like.shape)


def _held_local(layout: Layout, weights: Mapping[str, Array], dtype: Any) -> dict[str, Array]:
    """The device's experts whole, in the compute dtype; cast first, where the shards are."""
    held = {}
    for name, w in weights.items():
        splits = layout.weights[name]
        if splits.rest[1:] != splits.held[1:]:
            w = row_major_local(w)
        held[name] = move_local(w.astype(dtype), splits.rest, splits.held)
    return held


def _summed_local(layout: Layout, name: str, dw: Array) -> Array:
    """The gradient of the device's experts over all tokens, where it is wanted."""
    splits = layout.weights[name]
    dw = move_local(dw, splits.held, splits.grad, partial=layout.gradient_axes)
    return row_major_local(dw) if splits.grad[1:] != splits.held[1:] else dw


def token_spec(layout: Layout) -> Any:
    """Of tokens, at rest."""
    return spec_of((*layout.tokens, ()))


def rest_specs(layout: Layout) -> dict[str, Any]:
    """Of the experts' arrays, at rest."""
    return {name: spec_of(splits.rest) for name, splits in layout.weights.items()}


def mapped(layout: Layout, local: Callable, specs: tuple, out: Any) -> Callable:
    """`local` on every device of the plan."""
    if layout.bound is None:
        return local
    return jax.shard_map(
        local, mesh=layout.bound.mesh, in_specs=specs, out_specs=out, check_vma=False
    )
