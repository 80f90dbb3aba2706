"""A layer's forward pass and its transpose, as two programs and what goes from one to the other."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.compat import Equations

ApplyLayer = Callable[[Any, Any, Any, Array], Any]
"""`(parameters of a layer, carry, side, number) -> (carry, sums)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """Where an array that backward needs comes from.

    Attributes:
        source: `params`, `side` or `number`: an input that backward has again; `constant`: a value
            known when tracing; `kept`: something that forward hands over.
        at: Number of the input's leaf, of the constant, or of what is kept.
        carry: Of what is kept, whether it is a part of the layer's input.
        host: Of what is kept, whether the layer's policy put it into host memory.
    """

    source: str
    at: Any
    carry: bool = False
    host: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transposed:
    """What the transpose of a layer gives.

    Attributes:
        params: Gradient of its parameters.
        carry: Of its input.
        side: Of the side inputs that are differentiated, a list.
    """

    params: Any
    carry: Any
    side: list[Any]


jax.tree_util.register_dataclass(Transposed, ["params", "carry", "side"], [])


class Layer:
    """One layer, traced once: forward, transpose, and a description of what lies between.

    Nothing is noted while either is traced into a program: whoever runs layers may call them in any
    order, as often as he likes, with what `forward` kept held wherever he likes.

    Attributes:
        kept: Shapes of what backward needs beside parameters, side inputs and number.
        residuals: Where each array that backward needs comes from.
    """

    kept: tuple[jax.ShapeDtypeStruct, ...]
    residuals: tuple[Residual, ...]

    def __init__(self, apply: ApplyLayer, params: Any, carry: Any, side: Any, moving: Any = None):
        """Trace a layer.

        Args:
            apply: What it does, wrapped in its rematerialisation policy.
            params: Shapes of one layer's parameters, on the device.
            carry: Its input, or shapes.
            side: Side inputs, or shapes.
            moving: Tree of booleans like `side`, which of it is differentiated; None: nothing.
        """
        self.moving = jax.tree.map(lambda _: False, side) if moving is None else moving

        def call(params: Any, carry: Any, side: Any, number: Array) -> Any:
            def differentiated(params: Any, carry: Any, chosen: list[Any]) -> Any:
                return apply(params, carry, merged(side, self.moving, chosen), number)

            return jax.vjp(differentiated, params, carry, picked(side, self.moving))

        self._inputs = shapes_of((params, carry, side, jax.ShapeDtypeStruct((), jnp.int32)))
        traced, (self.out, vjp) = jax.make_jaxpr(call, return_shape=True)(*self._inputs)
        leaves, self._transpose = jax.tree.flatten(vjp)
        self._equations = Equations(traced)
        self._outputs = jax.tree.structure(self.out)
        self.residuals = self._origins(len(leaves))
        wanted = zip(leaves, self.residuals, strict=True)
        self.kept = tuple(leaf for leaf, each in wanted if each.source == "kept")

    def _origins(self, count: int) -> tuple[Residual, ...]:
        equations, leaves = self._equations, [len(jax.tree.leaves(x)) for x in self._inputs]
        names = ("params", "carry", "side", "number")
        places = [(n, i) for n, many in zip(names, leaves, strict=True) for i in range(many)]
        inputs = dict(zip(equations.inputs, places, strict=True))
        origins, kept = [], 0
        for atom in equations.outputs[len(equations.outputs) - count :]:
            value = equations.value(atom)
            source, at = ("constant", value) if value is not None else inputs.get(atom, ("kept", 0))
            if source in ("kept", "carry"):
                host, carry = equations.on_host(atom), source == "carry"
                origins.append(Residual(source="kept", at=kept, carry=carry, host=host))
                kept += 1
            else:
                origins.append(Residual(source=source, at=at))
        return tuple(origins)

    def forward(
        self, params: Any, carry: Any, side: Any, number: Array
    ) -> tuple[Any, tuple[Array, ...]]:
        """`((carry, sums), kept)`, the kept shaped as `self.kept`."""
        results = self._equations(*jax.tree.leaves((params, carry, side, number)))
        out = self._outputs.num_leaves
        pairs = zip(results[out:], self.residuals, strict=True)
        kept = tuple(leaf for leaf, each in pairs if each.source == "kept")
        return jax.tree.unflatten(self._outputs, results[:out]), kept

    def transpose(
        self, params: Any, side: Any, number: Array, kept: Sequence[Array], cotangent: Any
    ) -> Transposed:
        """Gradients by the layer's inputs.

        Args:
            params: As `forward` got them.
            side: Likewise.
            number: Likewise.
            kept: What `forward` kept.
            cotangent: By `(carry, sums)`.
        """
        sources = {
            "params": jax.tree.leaves(params),
            "side": jax.tree.leaves(side),
            "number": [number],
            "kept": kept,
        }
        leaves = [
            each.at if each.source == "constant" else sources[each.source][each.at]
            for each in self.residuals
        ]
        vjp = jax.tree.unflatten(self._transpose, leaves)
        return Transposed(**dict(zip(("params", "carry", "side"), vjp(cotangent), strict=True)))

    def transpose_apart(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The transpose as two programs: what the layer before waits for, and what nobody does.

        No equation of the first is done again by the second. What a policy recomputes counts as one
        equation, so of a layer that is recomputed the second repeats that.

        Returns:
            `input_gradient(params, side, number, kept, cotangent) -> (carry, side, pending)`, and
            `weight_gradient(pending) -> params`, `pending` being a list of arrays.

        Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism.
        """
        shapes = (self._inputs[0], *self._inputs[2:], self.kept, self.out)
        traced, gradients = jax.make_jaxpr(self.transpose, return_shape=True)(*shapes)
        equations = Equations(traced)
        weights = len(jax.tree.leaves(gradients.params))
        first, second = equations.split(equations.outputs[weights:], equations.outputs[:weights])
        later = jax.tree.structure((gradients.carry, gradients.side))

        def input_gradient(*inputs: Any) -> tuple[Any, Any, list[Array]]:
            values, count = first(*jax.tree.leaves(inputs)), later.num_leaves
            return *jax.tree.unflatten(later, values[:count]), values[count:]

        def weight_gradient(pending: Sequence[Array]) -> Any:
            return jax.tree.unflatten(jax.tree.structure(gradients.params), second(*pending))

        return input_gradient, weight_gradient


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def picked(side: Any, moving: Any) -> list[Any]:
    """The side inputs that are differentiated."""
    pairs = zip(jax.tree.leaves(side), jax.tree.leaves(moving), strict=True)
    return [x for x, moves in pairs if moves is True]


def merged(side: Any, moving: Any, chosen: Sequence[Any]) -> Any:
    """`side` with these in place of those that are differentiated."""
    remaining = iter(chosen)
    return jax.tree.map(lambda x, moves: next(remaining) if moves is True else x, side, moving)
