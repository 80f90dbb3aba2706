"""Maps of layers in the codes of a folder that was quantised before it was imported."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from colossax.errors import PlanError
from colossax.nn.layers import Linear
from colossax.nn.module import MakeModel
from colossax.nn.quantised.codes import Packing
from colossax.nn.quantised.forms import KEPT
from colossax.nn.quantised.grid import Grid
from colossax.nn.quantised.module import Quantised, packing_of, with_maps_of_layers
from colossax.nn.weights import Weighted
from colossax.pallas.int4_matmul.spec import CODES_A_BYTE
from colossax.sharding import current, resolve
from colossax.typing import Dims

GridOf = Callable[[str, tuple[int, ...]], Grid | None]
"""From the name of a map, from its layer down, and its shape: what its codes are; None: floats."""


class Kept(Quantised):
    """A matrix whose codes a checkpoint has: until they are read there is room for them alone."""

    @staticmethod
    def made(packing: Packing, w: Array) -> dict[str, Array]:
        """Room for what is kept."""
        assert packing.grid is not None
        parts = packing.grid.parts(packing.inputs, packing.outs)
        return {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in parts.items()}


def with_kept(make_model: MakeModel, grid_of: GridOf) -> MakeModel:
    """A factory of the same model, maps of its layers in the codes that a checkpoint has of them.

    All else stays as it is. Codes are read, not made: nothing else may build such a model.

    Args:
        make_model: Of a model whose maps are `colossax.nn.Linear`.
        grid_of: What the codes of a map are.
    """

    def made(name: str, module: Linear) -> Kept | None:
        grid = grid_of(name, tuple(module.weight.shape))
        return None if grid is None else Kept(module.held, _packing(module, grid))

    return with_maps_of_layers(make_model, made)


def _packing(module: Weighted, grid: Grid) -> Packing:
    packing = packing_of(module, KEPT)
    outs = module.dims[module.contract :]
    split = not grid.ordered and _divided((module.dims[0], *outs), (grid.groups, *packing.outs))
    as_int4 = split and grid.codes_a_byte == CODES_A_BYTE and grid.scales != "float32"
    return dataclasses.replace(
        packing,
        grid=dataclasses.replace(grid, split=split),
        group=packing.inputs // grid.groups if as_int4 else 0,
    )


def _divided(dims: Dims, shape: tuple[int, ...]) -> bool:
    """Whether devices divide groups as they do inputs."""
    bound = current()
    try:
        if bound is not None:
            resolve(bound, "params", dims, shape, name="scales")
    except PlanError:
        return False
    return True
