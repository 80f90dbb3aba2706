"""A layer's forward pass and its transpose, as two programs and what goes from one to the other."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.compat import Equations, inlined
from colossax.layerwise.loops import loops_apart

_HOST = "pinned_host"

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
        equations: As traced, from parameters, carry, side inputs and number to the layer's output
            and all that backward needs.
        out: Shapes of its output.
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
        self.equations = Equations(traced)
        self._outputs = jax.tree.structure(self.out)
        self.residuals = self._origins(len(leaves))
        wanted = zip(leaves, self.residuals, strict=True)
        self.kept = tuple(leaf for leaf, each in wanted if each.source == "kept")

    def _origins(self, count: int) -> tuple[Residual, ...]:
        equations, leaves = self.equations, [len(jax.tree.leaves(x)) for x in self._inputs]
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

    @property
    def backward_inputs(self) -> tuple[Any, Any, Any]:
        """Shapes of parameters, side inputs and number."""
        params, _, side, number = self._inputs
        return params, side, number

    def forward(
        self, params: Any, carry: Any, side: Any, number: Array
    ) -> tuple[Any, tuple[Array, ...]]:
        """`((carry, sums), kept)`, the kept shaped as `self.kept`."""
        results = self.equations(*jax.tree.leaves((params, carry, side, number)))
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

    def apart(self, *, loops: bool = False) -> "Apart":
        """The transpose as two programs.

        Args:
            loops: Whether its loops are in two parts as well; else one is in the first part.
        """
        return Apart(self, loops=loops)


class Apart:
    """A layer's transpose as two programs: what the layer before waits for, and what nobody does.

    No equation of the first is done again by the second: what a policy recomputes, the first does.

    Attributes:
        pending: Shapes of what goes from the first to the second.
        reads_kept: Whether the second reads what the layer's forward pass kept.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism.
    """

    def __init__(self, layer: Layer, *, loops: bool = False):
        """Trace the transpose.

        Args:
            layer: Of which.
            loops: See `Layer.apart`.
        """
        shapes = (*layer.backward_inputs, layer.kept, layer.out)
        traced, gradients = jax.make_jaxpr(layer.transpose, return_shape=True)(*shapes)
        weights = len(jax.tree.leaves(gradients.params))
        program = inlined(traced)
        equations = Equations(loops_apart(program, weights) if loops else program)
        later = equations.outputs[:weights], equations.outputs[weights:]
        counts = [len(jax.tree.leaves(shape)) for shape in shapes]
        again = equations.inputs[: sum(counts[:-1])]
        self._first, self._second, crossing = equations.split(later[1], later[0], again)
        self._input = jax.tree.structure((gradients.carry, gradients.side))
        self._params = jax.tree.structure(gradients.params)
        places = {variable: at for at, variable in enumerate(again)}
        self._sources = [places.get(variable) for variable in crossing]
        self.pending = [v.aval for v in crossing if v not in places]
        self.pending = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.pending]
        self.reads_kept = any(at is not None and at >= sum(counts[:-2]) for at in self._sources)

    def input_gradient(
        self, params: Any, side: Any, number: Array, kept: Sequence[Array], cotangent: Any
    ) -> tuple[Any, list[Any], list[Array]]:
        """`(carry, side, pending)`; arguments as for `Layer.transpose`."""
        values = self._first(*jax.tree.leaves((params, side, number, kept, cotangent)))
        count = self._input.num_leaves
        crossing = zip(values[count:], self._sources, strict=True)
        pending = [value for value, at in crossing if at is None]
        return *jax.tree.unflatten(self._input, values[:count]), pending

    def weight_gradient(
        self,
        params: Any,
        side: Any,
        number: Array,
        kept: Sequence[Any],
        pending: Sequence[Array],
    ) -> Any:
        """Gradient of the parameters, from what `input_gradient` got and left pending.

        Of `kept`, shapes suffice unless `reads_kept`.
        """
        again, rest = jax.tree.leaves((params, side, number, kept)), iter(pending)
        values = [next(rest) if at is None else again[at] for at in self._sources]
        return jax.tree.unflatten(self._params, self._second(*values))


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of arrays; those that are shapes in host memory stay so."""
    return jax.tree.map(_shape_of, tree)


def _shape_of(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) and getattr(x.sharding, "memory_kind", "") == _HOST:
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def picked(side: Any, moving: Any) -> list[Any]:
    """The side inputs that are differentiated."""
    pairs = zip(jax.tree.leaves(side), jax.tree.leaves(moving), strict=True)
    return [x for x, moves in pairs if moves is True]


def merged(side: Any, moving: Any, chosen: Sequence[Any]) -> Any:
    """`side` with these in place of those that are differentiated."""
    remaining = iter(chosen)
    return jax.tree.map(lambda x, moves: next(remaining) if moves is True else x, side, moving)
