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
from colossax.sharding.experts.exchange import (
    Route,
    dropped_local,
    in_passes,
    returned_local,
    route_local,
    sent_local,
)
from colossax.sharding.experts.layout import Layout
from colossax.sharding.experts.placement import placed_local
from colossax.sharding.experts.slots import (
    by_expert,
    collect,
    collect_choices,
    permuted,
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
        arrays: By name, `[l, ...]`, in the dtype of the rows; codes and their scales in their own.
        gradients: Zeros of their shapes in the dtype of sums, which are differentiated in their
            place; none where nothing is.
        sizes: `[l]`, rows of each expert; they come one expert after another.
        share: Devices that split the hidden features, each of which has all outputs.
        spared: Multiprocessors that are left to what runs beside.
    """

    arrays: Mapping[str, Array]
    gradients: Mapping[str, Array]
    sizes: Int[Array, " l"]
    share: int
    spared: int = 0

    def times(
        self, rows: Float[Array, "r d"], name: str, *, last: bool = False
    ) -> Float[Array, "r f"]:
        """Each row times the matrix of its expert.

        Args:
            rows: One expert's after another's.
            name: Of the matrices.
            last: Backward begins here: with the gradient of the matrices, after which the rows,
                the widest there are, need not be kept.
        """
        into, scales = self.gradients.get(name), scales_of(name)
        w = self.arrays[name].astype(rows.dtype)
        narrow = scales in self.arrays and rows.dtype == jnp.float16
        out = grouped_matmul(
            rows,
            w / _SHRUNK if narrow else w,  # sums of codes are too large for float16
            self.sizes,
            gradient_into=into,
            weight_first=last,
            spare_multiprocessors=self.spared,
        )
        if scales not in self.arrays:
            return out
        by = self.of_rows(scales, len(rows)) * (_SHRUNK if narrow else 1)
        return (out * by).astype(out.dtype)

    def of_rows(self, name: str, rows: int) -> Float[Array, "r f"]:
        """The vector of each row's expert; of none behind the last expert's rows, zeros."""
        vectors, into = self.arrays[name], self.gradients.get(name)
        dtype = vectors.dtype
        if into is not None:
            # Zeros; as wide as these an expert's gradients are added up.
            vectors = vectors.astype(into.dtype) + into
        ends = jnp.cumsum(self.sizes)
        number = jnp.searchsorted(ends, jnp.arange(rows), side="right")
        return vectors.at[number].get(mode="fill", fill_value=0).astype(dtype)


def scales_of(name: str) -> str:
    """Name of the scales of matrices that are kept in codes, a number for each output of each."""
    return f"{name}_scales"


def cast(weights: Mapping[str, Array], name: str, dtype: Any, w: Array) -> Array:
    """An array of experts, or a part of it, in the dtype of the rows; codes and scales as kept."""
    of = name.removesuffix(scales_of(""))
    return w if scales_of(of) in weights else w.astype(dtype)


_SHRUNK = 128

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
        route = route_local(layout, found)

        def send(number: Array | int) -> Any:
            return _given_local(layout, route, tokens, scales, number)

        def computed(number: Array | int, given: Any, total: Array) -> Any:
            rows, weight = given
            counts = route.arriving(number)
            return _computed_local(layout, compute, held, {}, rows, weight, counts), total

        def receive(number: Array | int, made: Array, total: Array) -> Array:
            return total + collect(returned_local(layout, route, made, number), route.taken(number))

        start = jnp.zeros(tokens.shape, jnp.float32)
        total = in_passes(layout, route.count, send, computed, receive, start)
        count = jnp.asarray(route.count, jnp.float32)
        return home_local(layout, total, x), count, dropped_local(layout, found)

    whole = spec_of(())
    run = mapped(
        layout,
        forward_local,
        (token_spec(layout), rest_specs(layout), token_spec(layout), token_spec(layout)),
        (token_spec(layout), whole, whole),
    )
    return run(x, weights, _slots_of(layout, expert), scale)


def _slots_of(layout: Layout, expert: Array) -> Array:
    """Numbers of what computes the chosen."""
    return expert if layout.placement is None else layout.placement.slot_of(expert)


def _fwd(
    layout: Layout, compute: Compute, x: Array, weights: Any, expert: Array, scale: Array
) -> tuple[Any, Any]:
    return _forward(layout, compute, x, weights, expert, scale), (x, weights, expert, scale)


def _bwd(layout: Layout, compute: Compute, residuals: Any, cotangents: Any) -> Any:
    x, weights, expert, scale = residuals

    def backward_local(x: Array, weights: Any, expert: Array, scale: Array, dy: Array) -> Any:
        held = _held_local(layout, weights, x.dtype)
        tokens, chosen, scales = tokens_local(layout, x, expert, scale)
        dtokens = _gathered_local(layout, _slice_local(layout, _flat(dy)))
        route = route_local(layout, sort_choices(chosen, _sorted_experts(layout)))
        into = {name: jnp.zeros(w.shape, layout.summed) for name, w in held.items()}

        # What is sent is linear, and its transpose is what comes back: that of experts' outputs.
        def send(number: Array | int) -> Any:
            given = _given_local(layout, route, tokens, scales, number)
            drows = spread(dtokens, route.taken(number)).astype(x.dtype)
            return given, sent_local(layout, route, drows, number)

        def computed(number: Array | int, sent: Any, totals: Any) -> Any:
            given, drows = sent
            counts = route.arriving(number)

            def differentiated(into: Any, rows: Array, weight: Array) -> Array:
                return _computed_local(layout, compute, held, into, rows, weight, counts)

            _, pull = jax.vjp(differentiated, into, *given)
            dheld, *dgiven = pull(drows)
            return tuple(dgiven), (jax.tree.map(jnp.add, totals[0], dheld), *totals[1:])

        def receive(number: Array | int, made: Any, totals: Any) -> Any:
            dheld, dx, dscale = totals
            taken = route.taken(number)
            drows, dweight = (returned_local(layout, route, each, number) for each in made)
            return dheld, dx + collect(drows, taken), dscale + collect_choices(dweight, taken)

        dx, dscale = (jnp.zeros(each.shape, jnp.float32) for each in (tokens, scales))
        start = (into, dx, dscale)
        dheld, dx, dscale = in_passes(layout, route.count, send, computed, receive, start)
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
    dx, dweights, dscale = run(x, weights, _slots_of(layout, expert), scale, cotangents[0])
    return dx, dweights, None, dscale


through_experts.defvjp(_fwd, _bwd)


def _given_local(
    layout: Layout, route: Route, tokens: Array, scales: Array, number: Array | int
) -> tuple[Array, Array]:
    """What this device's experts get in a pass: rows and their weights."""
    taken = route.taken(number)
    rows, weight = spread(tokens, taken), spread_choices(scales, taken)
    return sent_local(layout, route, rows, number), sent_local(layout, route, weight, number)


def _computed_local(
    layout: Layout,
    compute: Compute,
    held: Mapping[str, Array],
    into: Mapping[str, Array],
    rows: Array,
    weight: Array,
    counts: Array,
) -> Array:
    """What this device's experts make of rows, which come source after source."""
    order = by_expert(counts, layout.slots)
    if len(counts) > 1:
        rows, weight = (permuted(each, order.source, order.place) for each in (rows, weight))
    share = layout.size(layout.features)
    local = LocalExperts(
        arrays=held, gradients=into, sizes=order.sizes, share=share, spared=layout.spared
    )
    rows = compute(local, rows, weight)
    return permuted(rows, order.place, order.source) if len(counts) > 1 else rows


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
        w = move_local(cast(weights, name, dtype, w), splits.rest, splits.held)
        if layout.placement is not None:
            w = placed_local(layout.placement, layout.group, w)
        held[name] = w
    return held


def _summed_local(layout: Layout, name: str, dw: Array) -> Array:
    """The gradient of the device's experts over all tokens, where it is wanted."""
    splits = layout.weights[name]
    if layout.placement is not None:
        at_rest = (layout.placement.experts // layout.size(layout.group), *dw.shape[1:])
        placed = functools.partial(placed_local, layout.placement, layout.group)
        (dw,) = jax.linear_transpose(placed, jax.ShapeDtypeStruct(at_rest, dw.dtype))(dw)
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
