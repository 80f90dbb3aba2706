"""Codes put in the place of a model's matrices as it is built."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array

from colossax.errors import InputError
from colossax.nn.experts import Experts
from colossax.nn.layers import Linear
from colossax.nn.module import MakeModel, param
from colossax.nn.quantised.coded import CodedWeight
from colossax.nn.quantised.codes import Packing, Part, quantise
from colossax.nn.quantised.forms import IN_GROUPS, KEPT, SPARSE
from colossax.nn.quantised.made import GroupedWeight, SparseWeight
from colossax.nn.quantised.weight import QuantisedWeight
from colossax.nn.weights import Weighted, with_weights


class InCodes(nnx.Module):
    """Holds what is kept of a matrix, by the names of `Packing.part_dims`."""

    def __init__(self, held: nnx.Variable, packing: Packing):
        self.packing = packing
        made, dims = self.made(packing, held[...]), packing.part_dims()
        for name, value in made.items():
            part = Part(name, packing)
            dtype = None if part.as_the_matrix else value.dtype
            own: Any = param(value, dims[name], learns=False, dtype=dtype)
            own.set_metadata(quantised=part, inside=1)
            setattr(self, name, own)

    @staticmethod
    def made(packing: Packing, w: Array) -> dict[str, Array]:
        """What is kept of a matrix, by name."""
        return quantise(packing, w)

    @property
    def parts(self) -> dict[str, Array]:
        """What is kept, by name."""
        return {name: getattr(self, name)[...] for name in self.packing.part_dims()}


class Quantised(InCodes):
    """Of a matrix that is made again to be multiplied."""

    @property
    def weight(self) -> CodedWeight:
        """See `Weighted`."""
        return _TYPES.get(self.packing.form, QuantisedWeight)(self.parts, self.packing)


_TYPES = {
    **dict.fromkeys((*IN_GROUPS, KEPT), GroupedWeight),
    **dict.fromkeys(SPARSE, SparseWeight),
}
"""Of forms that nothing learns beside."""


def with_quantised(
    make_model: MakeModel,
    form: str,
    *,
    double: bool = False,
    group: int = 0,
    asked: str = "adapter.base",
) -> MakeModel:
    """A factory of the same model with the matrices of its layers' maps in codes.

    Embeddings, the head, norms and biases stay as they are.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        form: See `Packing`.
        double: Likewise.
        group: Likewise.
        asked: The setting that asks for it.

    Raises:
        InputError: When built: blocks do not divide a matrix, or there are experts.
    """

    others = "own" if form not in (*IN_GROUPS, *SPARSE) else "int8, fp8 or own"

    def made(name: str, module: Linear) -> Quantised:
        packing = packing_of(module, form, double=double, group=group)
        packing.check(name, asked)
        return Quantised(module.held, packing)

    def built(rngs: nnx.Rngs) -> nnx.Module:
        model = with_maps_of_layers(make_model, made)(rngs)
        for path, node in nnx.iter_graph(model):
            if isinstance(node, Experts):
                raise InputError(
                    f"{asked}: '{'/'.join(map(str, path))}' has experts, whose matrices are"
                    f" not kept in {form}; give {asked} {others}"
                )
        return model

    return built


def packing_of(
    module: Weighted, form: str, *, double: bool = False, group: int = 0, outliers: int = 0
) -> Packing:
    """How the matrix of a module is kept."""
    return Packing(
        form=form,
        double=double,
        shape=tuple(module.weight.shape),
        dims=module.dims,
        contract=module.contract,
        group=group,
        outliers=outliers,
    )


def with_maps_of_layers(
    make_model: MakeModel, made: Callable[[str, Linear], Quantised | None]
) -> MakeModel:
    """A factory of the same model, matrices of its layers' maps as `made` gives them; None: as is.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        made: From the name of a map, from its layer down, and the map.
    """
    layers_made = False

    def with_layers(rngs: nnx.Rngs) -> nnx.Module:
        nonlocal layers_made
        layers_made = False
        model = make_model(rngs)
        layers_made = True
        return model

    def of_layers(name: str, module: Weighted, rngs: nnx.Rngs) -> Quantised | None:
        if layers_made or not isinstance(module, Linear):
            return None  # the head is no map of a layer
        return made(name, module)

    return with_weights(with_layers, of_layers)
