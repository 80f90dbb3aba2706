"""Repeated layers as one scanned stack, or several segments of one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from colossax.config import Plan, Segment
from colossax.errors import InputError, PlanError
from colossax.layerwise import Key, LayerRun, LayerState, current_runner
from colossax.nn.module import Located
from colossax.nn.stack.calls import CallsByKind, joined, joined_sums
from colossax.nn.stack.kinds import Stretch, layers_before, stretches
from colossax.nn.stack.stacked import MakeLayer, stacked_layers
from colossax.nn.weights import layer_with_weights
from colossax.offload import on_host, resolved_segments
from colossax.sharding import current, rows_as_here

ONLY = ""
"""The kind of the layers of a stack that has one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOutput:
    """Result of a stack.

    Attributes:
        carry: After the last layer.
        scanned: State sliced per layer; in a stack of several kinds by kind.
        carried: State that travelled whole.
        sums: Per layer, `[layers, ...]`; 0 of layers that do not give it.
    """

    carry: Any
    scanned: Any
    carried: Any
    sums: dict[str, Array]


class LayerStack(Located):
    """Layers one after another; several equal ones are one stacked parameter tree and one scan.

    A layer is called as `layer(carry, side, state: LayerState) -> (carry, LayerState, sums)`. The
    carry is any pytree; `side` is the same for every layer; `sums` is a dict of float32 arrays,
    additive over tokens. Layer i is initialised from `fold_in(key, i)`, so segments do not show
    in the values.

    A stack of several kinds is `LayerStack({"local": make_local, "global": make_global}, ["local",
    "local", "global"] * 8, rngs=rngs)`: layers are numbered through, the plan's segments are of all
    of them, and a group that repeats is one scan. The parameters of a kind stand under its name,
    and on disk are numbered among themselves; so are the rows of its caches and its scanned state,
    both of which are then mappings by kind.

    Layers whose parameters live in host memory are fetched one by one; of experts, where tokens
    come with a cache, those that are chosen, but where kinds take turns. Who runs the layers is
    `colossax.layerwise.current_runner`; a training step that offloads updates each during backward.

    Cost: HLO size and compile time of one layer per segment (of one group, where kinds alternate);
    a segment of one layer emits no loop.
    """

    def __init__(
        self,
        make_layer: MakeLayer | Mapping[str, MakeLayer],
        layers: int | Sequence[str],
        *,
        rngs: nnx.Rngs,
        segments: Sequence[Segment] | None = None,
    ):
        """Build the layers.

        Args:
            make_layer: `rngs -> layer`; or one of each kind, by name.
            layers: How many; or the kind of each.
            rngs: Their key.
            segments: Default those of the plan in force, or one.

        Raises:
            InputError: Kinds and names do not agree.
            PlanError: The segments do not cover the layers.
        """
        kinds, self.order = _kinds(make_layer, layers)
        bound, count = current(), len(self.order)
        self.before = layers_before(count)
        if segments is None:
            segments = (Segment(),) if bound is None else self._asked(bound.plan)
        self.stretches = stretches(self.order, tuple(segments))
        key, dtype = rngs.params(), None if bound is None else bound.plan.precision.params

        def build(stretch: Stretch, kind: str) -> Any:
            return stacked_layers(
                layer_with_weights(kinds[kind]),
                key,
                stretch.numbers(kind),
                first_row=stretch.first_row(kind),
                total=self.order.count(kind),
                before=self.before,
                placement=stretch.policy.placement,
                dtype=dtype,
            )

        self.segments = nnx.List([_by_kind(stretch, build) for stretch in self.stretches])

    def __call__(
        self, carry: Any, side: Any = None, *, scanned: Any = None, carried: Any = None
    ) -> StackOutput:
        """Run all layers.

        Args:
            carry: Input of the first layer.
            side: Passed to every layer.
            scanned: Pytree of `[layers, ...]` state, or None; by kind, where there are several.
            carried: Pytree handed from layer to layer, or None; likewise.
        """
        runner = current_runner()
        scanned_out, sums_out = [], []
        for number, stretch in enumerate(self._planned()):
            segment = self.segments[number]
            made = CallsByKind if isinstance(segment, nnx.Dict) else CallsOfOne
            calls = made(segment, stretch)
            run = calls.run((self.path, number))
            carry, rows, carried, sums = runner.run(
                dataclasses.replace(
                    run, apply=rows_as_here(run.apply), before=self.before, left=calls.left(side)
                ),
                calls.params,
                carry,
                side,
                calls.rows(scanned),
                carried,
            )
            scanned_out.append(calls.flat(rows))
            sums_out.append(calls.flat_sums(sums))
        return StackOutput(
            carry=carry,
            scanned=joined(scanned_out),
            carried=carried,
            sums=joined_sums(sums_out, [stretch.count for stretch in self.stretches]),
        )

    def cache_spec(self, *, seats: int, slots: int, chunk: int | None = None) -> Any:
        """What a cache for `seats` sequences of up to `slots` tokens holds, as the layers say.

        Args:
            seats: Sequences.
            slots: Longest of them.
            chunk: Most tokens of a sequence in one call; None: any number.

        Returns:
            A `CacheSpec`; by kind where there are several. A cache made of it is `carried`.

        Raises:
            InputError: A layer keeps nothing of the tokens it has seen, or does not say what.
        """
        specs = {}
        for segment in self.segments:
            by_kind = segment if isinstance(segment, nnx.Dict) else {ONLY: segment}
            for kind, layer in by_kind.items():
                if kind not in specs:
                    if not hasattr(layer, "cache_spec"):
                        raise InputError(
                            f"model: {type(layer).__name__} has no cache_spec, which generation"
                            " needs; say there what the layer keeps, as colossax.nn.Block does"
                        )
                    count = self.order.count(kind)
                    specs[kind] = layer.cache_spec(
                        layers=count, seats=seats, slots=slots, chunk=chunk
                    )
        return specs[ONLY] if ONLY in specs else specs

    def _asked(self, plan: Plan) -> tuple[Segment, ...]:
        """The plan's segments of these layers."""
        return resolved_segments(plan, len(self.order), before=self.before)

    def _planned(self) -> tuple[Stretch, ...]:
        """The stretches as the plan in force wants them run."""
        bound = current()
        if bound is None:
            return tuple(
                dataclasses.replace(b, policy=Segment(count=b.count, offload=b.policy.offload))
                for b in self.stretches
            )
        wanted = stretches(self.order, self._asked(bound.plan))
        if [stretch.place for stretch in wanted] != [stretch.place for stretch in self.stretches]:
            asked, built = (", ".join(_shown(b) for b in each) for each in (wanted, self.stretches))
            raise PlanError(
                f"plan.segments: the plan in force wants layers {asked}, the model was"
                f" built with {built}; build the model under the plan that runs it"
            )
        return wanted


class CallsOfOne:
    """Of a stack whose layers are all of one kind.

    Attributes:
        params: Of its layers, stacked.
    """

    def __init__(self, segment: Any, stretch: Stretch):
        self._graphdef, params = nnx.split(segment)
        self._stretch = stretch
        self._own_fetch = nnx.to_pure_dict(params, _own_fetch)
        self.params = nnx.to_pure_dict(params, lambda variable: variable.get_raw_value())

    def left(self, side: Any) -> Any:
        """Parameters in host memory that layers fetch themselves, where tokens are few."""
        if not dataclasses.is_dataclass(side) or getattr(side, "flat", None) is None:
            return None  # not of tokens with addresses in a cache
        left = jax.tree.map(lambda own, x: own and on_host(x), self._own_fetch, self.params)
        return left if any(jax.tree.leaves(left)) else None

    def run(self, key: Key) -> LayerRun:
        """What a runner is told of them."""
        stretch = self._stretch
        return LayerRun(
            key=key,
            apply=self._layer,
            first=stretch.first,
            first_row=stretch.first,
            count=stretch.count,
            stacked=stretch.count > 1,
            policy=stretch.policy,
        )

    def rows(self, scanned: Any) -> Any:
        """Their part of the stack's scanned state."""
        first, count = self._stretch.first, self._stretch.count
        return jax.tree.map(lambda x: x[first : first + count], scanned)

    def flat(self, rows: Any) -> Any:
        """Scanned state that came back, `[layers, ...]`."""
        return rows

    def flat_sums(self, sums: dict[str, Array]) -> dict[str, Array]:
        """Sums, `[layers, ...]`."""
        return sums

    def _layer(self, row: Any, carry: Any, side: Any, state: LayerState) -> Any:
        return nnx.merge(self._graphdef, row)(carry, side, state)


def _own_fetch(variable: Any) -> bool:
    """Whether the layer can take a parameter as it is in host memory."""
    return bool(variable.get_metadata().get("own_fetch"))


def _kinds(make_layer: Any, layers: Any) -> tuple[dict[str, MakeLayer], tuple[str, ...]]:
    """Factories by kind, and the kind of each layer."""
    if not isinstance(make_layer, Mapping):
        return {ONLY: make_layer}, (ONLY,) * layers
    order = tuple(layers)
    if set(order) != set(make_layer):
        raise InputError(
            f"LayerStack: layers are of kinds {sorted(set(order))}, and there are factories for"
            f" {sorted(make_layer)}; give one for each kind"
        )
    return dict(make_layer), order


def _by_kind(stretch: Stretch, build: Callable[[Stretch, str], Any]) -> Any:
    names = dict.fromkeys(name for name, _ in stretch.group)
    if ONLY in names:
        return build(stretch, ONLY)
    return nnx.Dict({name: build(stretch, name) for name in names})


def _shown(stretch: Stretch) -> str:
    """Layers of a stretch and where their parameters live, which cannot change once it is built."""
    count, hosted, experts = stretch.place
    if experts:
        return f"{count} with experts in host memory"
    return f"{count} in host memory" if hosted else str(count)
