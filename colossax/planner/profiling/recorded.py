"""Which layer stacks a loss runs, with the shapes they get."""

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array

from colossax.layerwise import Layer, LayerRun, Marking, Scanned, shapes_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRun:
    """Layers that are alike, as they were called.

    Attributes:
        layers: How they are applied.
        row: Shapes of one call's parameters.
        carry: Of its input.
        others: Of side inputs and of state that layers have or hand on.
    """

    layers: LayerRun
    row: Any
    carry: Any
    others: Any

    @functools.cached_property
    def layer(self) -> Layer:
        """One call, traced with nothing recomputed."""

        def apply(row: Any, carry: Any, others: Any, number: Array) -> Any:
            side, scanned, carried = others
            state = self.layers.state(number, scanned, carried)
            carry, state, sums = self.layers.apply(row, carry, side, state)
            return carry, (state.scanned, state.carried, sums)

        return Layer(apply, self.row, self.carry, self.others)


class Recorder(Marking):
    """Notes what layers get, and traces one of each run. In the loss a run is then one equation;
    one that hands state from layer to layer is run as `Scanned` does.

    Attributes:
        runs: In the order of their calls.
        scanned: Numbers of those that are no equation.
    """

    def __init__(self, *, scans: bool = False) -> None:
        """Args:
        scans: Whether all are run, as where the loss transforms what calls them.
        """
        super().__init__()
        self.runs: list[RecordedRun] = []
        self.scanned: list[int] = []
        self._scans = scans

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""
        if not self._scans and not jax.tree.leaves((scanned, carried)):
            return super().run(layers, params, carry, side, scanned, carried)
        self.scanned.append(len(self.runs))
        self._record(layers, params, carry, side, scanned, carried)
        return Scanned().run(layers, params, carry, side, scanned, carried)

    def shapes(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> Any:
        """See `Marking.shapes`."""
        run = self._record(layers, params, carry, side, scanned, carried)
        carry, (_, _, sums) = shapes_of(run.layer.out)

        def of_all(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((layers.count, *x.shape), x.dtype)

        return carry, jax.tree.map(of_all, sums)

    def _record(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> RecordedRun:
        def row(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:] if layers.stacked else x.shape, x.dtype)

        def state(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        run = RecordedRun(
            layers=layers,
            row=jax.tree.map(row, params),
            carry=shapes_of(carry),
            others=(shapes_of(side), jax.tree.map(state, scanned), shapes_of(carried)),
        )
        self.runs.append(run)
        return run
