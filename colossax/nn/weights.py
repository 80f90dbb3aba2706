"""Weights of another kind in a model that is built by others."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

from colossax.errors import InputError
from colossax.nn.module import Located, MakeModel
from colossax.sharding import Dense, Weight
from colossax.typing import Dims


class Weighted(nnx.Module):
    """A module around one weight; `Linear` and `Embedding` are.

    Attributes:
        dims: Logical dims of the weight.
        contract: How many of them are of the input.
        held_as: Name of the attribute that holds it: a parameter, or a module with a `weight`.
    """

    dims: Dims
    contract: int = 1
    held_as: str = "w"

    @property
    def held(self) -> Any:
        """The parameter, or what stands in its place."""
        return getattr(self, self.held_as)

    @property
    def weight(self) -> Weight:
        """The weight, of which everything that multiplies or reads it asks."""
        return weight_of(self.held, self.dims)


def weight_of(held: Any, dims: Dims) -> Weight:
    """The weight that a module holds: `Dense` of a parameter, else what it says itself."""
    return Dense(held[...], dims) if isinstance(held, nnx.Variable) else held.weight


MakeWeight = Callable[[str, Weighted, nnx.Rngs], nnx.Module | None]
"""From the path, the module and random keys: what is to hold its weight, or None for no change."""


@runtime_checkable
class MakesSeveral(Protocol):
    """A `MakeWeight` that knows modules of several weights too, as experts are."""

    def several(self, node: Any) -> None:
        """Put others in their places, where a node of the model is such a module."""
        ...


def with_weights(make_model: MakeModel, make: MakeWeight) -> MakeModel:
    """A factory of the same model with weights of another kind in place.

    `make(path, module, rngs)` is asked for every `Linear` and `Embedding` once it is built, and
    returns an `nnx.Module` whose property `weight` is a `colossax.sharding.Weight`, or None. What
    was there, `module.held`, is a parameter or of an earlier `with_weights`; it may become a part
    of the new one, and `weight_of(it, module.dims)` is its weight. The parts are parameters as any
    other: below the path of the old one, with their own dims, stacked where layers are.

    Args:
        make_model: Of any model of modules of the library.
        make: Called with names from the model down (`head`), for a layer of a stack from the layer
            down (`attn/q`), and keys that change nothing of what is drawn for the model.

    Raises:
        InputError: When built: what `make` returned has no weight, or one of another shape.
    """

    def built(rngs: nnx.Rngs) -> nnx.Module:
        with _MAKERS((*_MAKERS.value, make)):
            model = make_model(rngs)
        return _put(model, make, rngs)

    return built


def layer_with_weights(make_layer: MakeModel) -> MakeModel:
    """Of a stack's layer: the factory that `with_weights` wants while the model is built."""
    makers = _MAKERS.value

    def built(rngs: nnx.Rngs) -> nnx.Module:
        layer = make_layer(rngs)
        for make in reversed(makers):
            layer = _put(layer, make, rngs)
        return layer

    return built if makers else make_layer


# A user context, as the plan: a function that is traced inside and outside is traced twice.
_MAKERS = jax.make_user_context(default_value=())


def _put(model: nnx.Module, make: MakeWeight, rngs: nnx.Rngs) -> nnx.Module:
    nodes = list(nnx.iter_graph(model))
    stacks = [path for path, node in nodes if isinstance(node, Located)]
    for path, module in nodes:
        if any(path[: len(s)] == s for s in stacks):
            continue  # a stack's layers were given theirs as they were built
        if isinstance(make, MakesSeveral):
            make.several(module)
        if not isinstance(module, Weighted):
            continue
        name = "/".join(map(str, path))
        holder = make(name, module, rngs)
        if holder is not None:
            _check(name, module, holder)
            if getattr(module, "history", None) is not None:
                raise InputError(
                    f"with_weights: '{name}' has a history of float8 scales, which a"
                    f" {type(holder).__name__} in place of its matrix would not read; give"
                    " plan.precision.float8.scaling current, or matmul compute"
                )
            _note_parts(module.held, holder)
            setattr(module, module.held_as, holder)
    return model


def _note_parts(held: Any, holder: nnx.Module) -> None:
    """How deep in the holder each parameter stands that was there before; 0: it is new."""
    for path, node in nnx.iter_graph(holder):
        if isinstance(node, nnx.Variable):
            old = node is held or node.get_metadata().get("inside")
            node.set_metadata(inside=len(path) if old else 0)


def _check(name: str, module: Weighted, holder: Any) -> None:
    weight = getattr(holder, "weight", None)
    if not isinstance(weight, Weight) or weight.shape != module.weight.shape:
        what = f"one of shape {weight.shape}" if isinstance(weight, Weight) else "none"
        raise InputError(
            f"with_weights: '{name}' needs a weight of shape {module.weight.shape}, and"
            f" {type(holder).__name__} has {what}; give it a property `weight` of that shape"
        )
