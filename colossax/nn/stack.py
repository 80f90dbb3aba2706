"""Repeated layers as one scanned stack, or several segments of one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from colossax.config import Segment
from colossax.errors import PlanError
from colossax.nn.module import pure, refuse_others
from colossax.sharding import current, recomputing

MakeLayer = Callable[[nnx.Rngs], nnx.Module]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
    """What one layer gets beside its input, and gives back.

    Attributes:
        index: Global layer number, int32 scalar.
        scanned: State sliced per layer (dim 0 of the stack's is layers), or None.
        carried: State that travels whole from layer to layer (caches: a slice would be a copy).
    """

    index: Any
    scanned: Any = None
    carried: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOutput:
    """Result of a stack: carry and state after the last layer, `sums` per layer `[layers]`."""

    carry: Any
    scanned: Any
    carried: Any
    sums: dict[str, Array]


class LayerStack(nnx.Module):
    """`count` equal layers; a segment of several is one stacked parameter tree and one scan.

    A layer is called as `layer(carry, side, state: LayerState) -> (carry, LayerState, sums)`. The
    carry is any pytree; `side` is the same for every layer; `sums` is a dict of float32 scalars,
    additive over tokens. Layer i is initialised from `fold_in(key, i)`, so segments do not show
    in the values.

    Cost: HLO size and compile time of one layer per segment; a segment of one layer emits no loop.
    """

    def __init__(
        self,
        make_layer: MakeLayer,
        count: int,
        *,
        rngs: nnx.Rngs,
        segments: Sequence[Segment] | None = None,
    ):
        bound = current()
        if segments is None:
            segments = (Segment(),) if bound is None else bound.plan.segments
        key = rngs.params()
        self.counts = segment_counts(segments, count)
        firsts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        self.segments = nnx.List(
            [
                _build_segment(make_layer, key, first, size, count)
                for first, size in zip(firsts, self.counts, strict=True)
            ]
        )

    def __call__(
        self, carry: Any, side: Any = None, *, scanned: Any = None, carried: Any = None
    ) -> StackOutput:
        """Run all layers.

        Args:
            carry: Input of the first layer.
            side: Passed to every layer.
            scanned: Pytree of `[layers, ...]` state, or None.
            carried: Pytree handed from layer to layer, or None.
        """
        remats = self._remats()
        first = 0
        scanned_out, sums_out = [], []
        for segment, size, remat in zip(self.segments, self.counts, remats, strict=True):
            part = jax.tree.map(lambda x, a=first, n=size: x[a : a + n], scanned)
            run = _run_one if size == 1 else _run_scan
            carry, part, carried, sums = run(
                segment, carry, side, part, carried, first, size, remat
            )
            scanned_out.append(part)
            sums_out.append(sums)
            first += size
        join = _concatenate if len(sums_out) > 1 else (lambda parts: parts[0])
        return StackOutput(
            carry=carry, scanned=join(scanned_out), carried=carried, sums=join(sums_out)
        )

    def _remats(self) -> tuple[str, ...]:
        bound = current()
        if bound is None:
            return ("none",) * len(self.counts)
        wanted = segment_counts(bound.plan.segments, sum(self.counts))
        if wanted != self.counts:
            raise PlanError(
                f"plan.segments: the plan in force wants layers {wanted}, the model was built with"
                f" {self.counts}; build the model under the plan that runs it"
            )
        return tuple(segment.remat for segment in bound.plan.segments)


def segment_counts(segments: Sequence[Segment], layers: int) -> tuple[int, ...]:
    """Layers per segment.

    Raises:
        PlanError: They do not sum to `layers`.
    """
    fixed = sum(s.count for s in segments if s.count != -1)
    counts = tuple(layers - fixed if s.count == -1 else s.count for s in segments)
    if sum(counts) != layers or min(counts) < 1:
        raise PlanError(
            f"plan.segments: counts {tuple(s.count for s in segments)}"
            f" do not cover {layers} layers;"
            f" make them sum to {layers} or give one of them -1"
        )
    return counts


def _build_segment(make_layer: MakeLayer, key: Array, first: int, size: int, total: int) -> Any:
    def init_layer(index: Array) -> Any:
        return pure(make_layer(nnx.Rngs(jax.random.fold_in(key, index))))

    template = nnx.eval_shape(lambda: make_layer(nnx.Rngs(0)))
    refuse_others(template, "layer")
    if size == 1:
        values = init_layer(jnp.int32(first))
    else:
        values = jax.vmap(init_layer)(jnp.arange(first, first + size, dtype=jnp.int32))
    segment = nnx.merge(nnx.split(template)[0], values)
    for _, variable in nnx.to_flat_state(nnx.state(segment, nnx.Param)):
        dims = variable.get_metadata().get("out_sharding") or (None,) * (variable.ndim - (size > 1))
        stacked = dims if size == 1 else ("layers", *dims)
        variable.set_metadata(out_sharding=stacked, first_layer=first, total_layers=total)
    return segment


def _run_one(segment, carry, side, scanned, carried, first, size, remat):
    def call(params, carry, scanned, carried):
        layer = nnx.merge(graphdef, params)
        state = LayerState(index=jnp.int32(first), scanned=scanned, carried=carried)
        return layer(carry, side, state)

    graphdef, params = nnx.split(segment)
    own = jax.tree.map(lambda x: x[0], scanned)
    call = _checkpointed(call, remat, in_loop=False)
    carry, state, sums = call(nnx.to_pure_dict(params), carry, own, carried)
    lifted = jax.tree.map(lambda x: x[None], (state.scanned, sums))
    return carry, lifted[0], state.carried, lifted[1]


def _run_scan(segment, carry, side, scanned, carried, first, size, remat):
    graphdef, params = nnx.split(segment)

    def body(loop, xs):
        carry, carried = loop
        index, layer_params, layer_scanned = xs
        layer = nnx.merge(graphdef, layer_params)
        state = LayerState(index=index, scanned=layer_scanned, carried=carried)
        carry, state, sums = layer(carry, side, state)
        return (carry, state.carried), (state.scanned, sums)

    body = _checkpointed(body, remat, in_loop=True)
    indices = jnp.arange(first, first + size, dtype=jnp.int32)
    (carry, carried), (scanned, sums) = jax.lax.scan(
        body, (carry, carried), (indices, nnx.to_pure_dict(params), scanned)
    )
    return carry, scanned, carried, sums


def _checkpointed(fn: Callable, remat: str, *, in_loop: bool) -> Callable:
    if remat == "none":
        return fn
    policies = jax.checkpoint_policies
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        policy = policies.save_only_these_names(*remat.split("+"))

    def marked(*args: Any) -> Any:
        with recomputing():
            return fn(*args)

    # A loop body is compiled apart from its backward, so nothing can be merged back across.
    return jax.checkpoint(marked, policy=policy, prevent_cse=not in_loop)


def _concatenate(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
