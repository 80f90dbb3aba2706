"""Repeated layers as one scanned stack, or several segments of one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import HOST_KINDS, SAVEABLE, Segment
from colossax.errors import PlanError
from colossax.nn.module import Located, pure, refuse_others
from colossax.nn.weights import layer_with_weights
from colossax.offload import (
    Run,
    build_stack,
    current_stream,
    fetch,
    resolved_segments,
    run_streamed,
    segment_counts,
)
from colossax.optim import decays
from colossax.sharding import (
    activation_sharding,
    current,
    keeping,
    recomputing,
    replicated,
    resolve,
)

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


class LayerStack(Located):
    """`count` equal layers; a segment of several is one stacked parameter tree and one scan.

    A layer is called as `layer(carry, side, state: LayerState) -> (carry, LayerState, sums)`. The
    carry is any pytree; `side` is the same for every layer; `sums` is a dict of float32 scalars,
    additive over tokens. Layer i is initialised from `fold_in(key, i)`, so segments do not show
    in the values.

    Layers whose parameters live in host memory are fetched one by one. In a training step that
    offloads, backward updates each layer when its gradient is there: see `colossax.offload`.

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
            segments = (Segment(),) if bound is None else resolved_segments(bound.plan, count)
        key = rngs.params()
        make_layer = layer_with_weights(make_layer)
        self.counts = segment_counts(tuple(segments), count)
        self.offloads = tuple(segment.offload for segment in segments)
        dtype = None if bound is None else bound.plan.precision.params
        firsts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        self.segments = nnx.List(
            [
                _build_segment(make_layer, key, first, size, count, segment.host, dtype)
                for first, size, segment in zip(firsts, self.counts, segments, strict=True)
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
        first = 0
        scanned_out, sums_out = [], []
        for number, policy in enumerate(self._policies()):
            segment, size = self.segments[number], self.counts[number]
            part = jax.tree.map(lambda x, a=first, n=size: x[a : a + n], scanned)
            call = _Call((self.path, number), segment, first, size, policy)
            carry, part, carried, sums = call.run(carry, side, part, carried)
            scanned_out.append(part)
            sums_out.append(sums)
            first += size
        join = _concatenate if len(sums_out) > 1 else (lambda parts: parts[0])
        return StackOutput(
            carry=carry, scanned=join(scanned_out), carried=carried, sums=join(sums_out)
        )

    def _policies(self) -> tuple[Segment, ...]:
        bound = current()
        if bound is None:
            return tuple(
                Segment(count=size, offload=offload)
                for size, offload in zip(self.counts, self.offloads, strict=True)
            )
        wanted = resolved_segments(bound.plan, sum(self.counts))
        built = tuple(map(_shown, self.counts, self.offloads))
        asked = tuple(_shown(segment.count, segment.offload) for segment in wanted)
        if asked != built:
            raise PlanError(
                f"plan.segments: the plan in force wants layers {', '.join(asked)}, the model was"
                f" built with {', '.join(built)}; build the model under the plan that runs it"
            )
        return wanted


def _shown(count: int, offload: str) -> str:
    """Layers of a segment and where their parameters live, which cannot change once it is built."""
    return f"{count} in host memory" if "parameters" in offload.split("+") else str(count)


def _build_segment(
    make_layer: MakeLayer,
    key: Array,
    first: int,
    size: int,
    total: int,
    host: frozenset[str],
    dtype: Any,
) -> Any:
    def init_layer(index: Array) -> Any:
        return pure(make_layer(nnx.Rngs(jax.random.fold_in(key, index))))

    template = nnx.eval_shape(lambda: make_layer(nnx.Rngs(0)))
    refuse_others(template, "layer")
    graphdef, leaves = nnx.split(template)
    kinds = nnx.to_pure_dict(leaves, lambda leaf: _host_kinds(leaf, host))
    if size == 1:
        values = init_layer(jnp.int32(first))
    elif "parameters" in host:
        # In the dtype at rest from the start: a stack in host memory cannot be cast.
        values = build_stack(
            lambda i: jax.tree.map(lambda x: x.astype(dtype or x.dtype), init_layer(first + i)),
            size,
            jax.tree.map(lambda kind: "parameters" in kind, kinds, is_leaf=_is_kinds),
            _row_shardings(leaves),
        )
    else:
        values = jax.vmap(init_layer)(jnp.arange(first, first + size, dtype=jnp.int32))
    segment = nnx.merge(graphdef, values)
    for _, variable in nnx.to_flat_state(nnx.state(segment, nnx.Param)):
        dims = variable.get_metadata().get("out_sharding") or (None,) * (variable.ndim - (size > 1))
        stacked = dims if size == 1 else ("layers", *dims)
        variable.set_metadata(
            out_sharding=stacked,
            first_layer=first,
            total_layers=total,
            host=_host_kinds(variable, host),
        )
    return segment


def _row_shardings(leaves: Any) -> Any:
    """Shardings of one layer's parameters at rest; None on a single device."""
    bound = current()
    if bound is None or bound.single:
        return None

    def of(variable: Any) -> NamedSharding:
        dims = variable.get_metadata().get("out_sharding") or (None,) * variable.ndim
        spec = resolve(bound, "params", dims, variable.shape, name="layer")
        return NamedSharding(bound.mesh, spec)

    return nnx.to_pure_dict(leaves, of)


def _is_kinds(x: Any) -> bool:
    return isinstance(x, frozenset)


def _host_kinds(variable: Any, host: frozenset[str]) -> frozenset[str]:
    """What of a parameter lives in host memory: of vectors nothing, they are small.

    On disk a layer's state is one record, vectors and all; the CPU updates all of a layer.
    """
    dims = variable.get_metadata().get("out_sharding") or (None,) * variable.ndim
    kinds = HOST_KINDS[:2] if decays(dims) else ()
    return host.intersection({*kinds, "disk", "cpu"})


@dataclasses.dataclass(frozen=True)
class _Call:
    """A segment and how its layers are run."""

    key: tuple[str, int]
    segment: Any
    first: int
    size: int
    policy: Segment

    def run(self, carry: Any, side: Any, scanned: Any, carried: Any) -> Any:
        """(carry, scanned, carried, sums) after its layers."""
        stream = current_stream()
        if stream is not None and self.key in stream.stacks:
            return self._streamed(stream, carry, side, scanned, carried)
        run = _run_one if self.size == 1 else _run_scan
        return run(self.segment, carry, side, scanned, carried, self.first, self.size, self.policy)

    def _streamed(self, stream: Any, carry: Any, side: Any, scanned: Any, carried: Any) -> Any:
        if jax.tree.leaves((scanned, carried)):
            raise PlanError(
                f"plan.offload: the layer stack '{self.key[0]}' hands state from layer to layer,"
                " which cannot be done while layers are updated during backward; train without"
                " offload"
            )
        graphdef, params = nnx.split(self.segment)
        stacked = self.size > 1

        def apply(row: Any, carry: Any, side: Any, index: Array) -> tuple[Any, Any]:
            state = LayerState(index=index, scanned=scanned, carried=carried)
            carry, _, sums = nnx.merge(graphdef, row)(carry, side, state)
            return carry, sums

        run = Run(
            key=self.key,
            apply=_checkpointed(apply, self.policy, in_loop=stacked),
            first=self.first,
            count=self.size,
            stacked=stacked,
            host_inputs="input" in self.policy.host,
            host_saved="activations" in self.policy.host,
            sharding_of=kept_sharding,
        )
        carry, sums = run_streamed(stream, run, nnx.to_pure_dict(params), carry, side)
        return carry, scanned, carried, sums


def kept_sharding(leaf: Any) -> NamedSharding | None:
    """Of what a layer keeps for backward: batch and sequence first, as all it computes."""
    bound = current()
    if bound is None or bound.single:
        return None
    dims = ("batch:inner", "seq", *[None] * leaf.ndim)[: leaf.ndim]
    try:
        return activation_sharding(bound, dims, leaf.shape)
    except PlanError:
        return replicated(bound)  # no activation: something small that all devices have


def _run_one(segment, carry, side, scanned, carried, first, size, policy):
    def call(params, carry, scanned, carried):
        layer = nnx.merge(graphdef, params)
        state = LayerState(index=jnp.int32(first), scanned=scanned, carried=carried)
        return layer(carry, side, state)

    graphdef, params = nnx.split(segment)
    own = jax.tree.map(lambda x: x[0], scanned)
    call = _checkpointed(call, policy, in_loop=False)
    row = fetch(nnx.to_pure_dict(params), 0, stacked=False)
    carry, state, sums = call(row, carry, own, carried)
    lifted = jax.tree.map(lambda x: x[None], (state.scanned, sums))
    return carry, lifted[0], state.carried, lifted[1]


def _run_scan(segment, carry, side, scanned, carried, first, size, policy):
    graphdef, params = nnx.split(segment)
    stacks = nnx.to_pure_dict(params)
    hosted = "parameters" in policy.host

    def body(loop, xs):
        carry, carried = loop
        index, layer_params, layer_scanned = xs
        if hosted:
            layer_params = fetch(stacks, index - first)
        layer = nnx.merge(graphdef, layer_params)
        state = LayerState(index=index, scanned=layer_scanned, carried=carried)
        carry, state, sums = layer(carry, side, state)
        return (carry, state.carried), (state.scanned, sums)

    body = _checkpointed(body, policy, in_loop=True)
    indices = jnp.arange(first, first + size, dtype=jnp.int32)
    (carry, carried), (scanned, sums) = jax.lax.scan(
        body, (carry, carried), (indices, None if hosted else stacks, scanned)
    )
    return carry, scanned, carried, sums


def _checkpointed(fn: Callable, segment: Segment, *, in_loop: bool) -> Callable:
    offloaded = sorted(segment.host.intersection(SAVEABLE))
    if segment.remat == "none":
        return fn
    share = segment.mlp_share
    if not isinstance(share, float):
        raise PlanError(
            f"segments.mlp_share {share!r}: the share is not known yet; train with"
            " colossax.boost(..., shapes=batch), which finds it, or give a number"
        )

    def marked(*args: Any) -> Any:
        with recomputing(), keeping(share):
            return fn(*args)

    # A loop body is compiled apart from its backward, so nothing can be merged back across.
    policy = _policy(segment.remat, offloaded)
    return jax.checkpoint(marked, policy=policy, prevent_cse=not in_loop)


def _policy(remat: str, offloaded: list[str]) -> Callable:
    """What `remat` keeps on the device, and these names in host memory."""
    policies = jax.checkpoint_policies
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    kept = [] if remat == "full" else [n for n in remat.split("+") if n not in offloaded]
    if offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*kept) if kept else policies.nothing_saveable


def _concatenate(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
