"""Which layer stacks a loss runs, with the shapes they get."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from colossax.layerwise import Layer, LayerRun, Scanned, shapes_of


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

    def layer(self) -> Layer:
        """One call, traced with nothing recomputed."""

        def apply(row: Any, carry: Any, others: Any, number: Array) -> Any:
            side, scanned, carried = others
            state = self.layers.state(number, scanned, carried)
            carry, state, sums = self.layers.apply(row, carry, side, state)
            return carry, (state.scanned, state.carried, sums)

        return Layer(apply, self.row, self.carry, self.others)


class Recorder:
    """Runs layers one after another, as `Scanned` does, and notes what they got.

    Attributes:
        runs: In the order of their calls.
    """

    def __init__(self) -> None:
        self.runs: list[RecordedRun] = []

    def run(
        self, layers: LayerRun, params: Any, carry: Any, side: Any, scanned: Any, carried: Any
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """See `StackRunner.run`."""

        def row(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:] if layers.stacked else x.shape, x.dtype)

        def state(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        self.runs.append(
            RecordedRun(
                layers=layers,
                row=jax.tree.map(row, params),
                carry=shapes_of(carry),
                others=(
                    shapes_of(side),
                    jax.tree.map(state, scanned),
                    shapes_of(carried),
                ),
            )
        )
        return Scanned().run(layers, params, carry, side, scanned, carried)
