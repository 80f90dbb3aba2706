"""Layers of one kind, their parameters stacked, each array made where it lives."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from colossax.config import Placement
from colossax.nn.module import own_dtype, pure, refuse_others
from colossax.nn.rngs import fresh_rngs
from colossax.offload import build_stack
from colossax.optim import decays
from colossax.sharding import current, resolve
from colossax.typing import Dims

MakeLayer = Callable[[nnx.Rngs], nnx.Module]


def stacked_layers(
    make_layer: MakeLayer,
    key: Array,
    numbers: Sequence[int],
    *,
    first_row: int,
    total: int,
    before: int,
    placement: Placement,
    dtype: Any,
) -> Any:
    """Layers of one kind as one module, whose parameters have a dim of layers in front.

    Args:
        make_layer: `rngs -> layer`.
        key: Of the stack; layer i is made with `fold_in(key, i)`.
        numbers: Of the layers in their stack, ascending; a single one gets no dim of layers.
        first_row: Number of the first one among all of its kind.
        total: Layers of that kind in the stack.
        before: Layers of the stacks that were made before.
        placement: Where they live.
        dtype: At rest, None as made.

    Raises:
        InputError: A layer holds other variables than parameters.
    """
    size = len(numbers)

    def init_layer(index: Array) -> Any:
        return pure(make_layer(fresh_rngs(jax.random.fold_in(key, index))))

    def number(i: Any) -> Any:
        run = numbers[-1] - numbers[0] + 1 == size
        return numbers[0] + i if run else jnp.asarray(numbers, jnp.int32)[i]

    template = nnx.eval_shape(lambda: make_layer(fresh_rngs(0)))
    refuse_others(template, "layer")
    graphdef, leaves = nnx.split(template)
    if size == 1:
        values = init_layer(jnp.int32(numbers[0]))
    elif placement.any_params_on_host:
        # In the dtype at rest from the start: a stack in host memory cannot be cast.
        kept = nnx.to_pure_dict(leaves, lambda leaf: own_dtype(leaf) or dtype or leaf.dtype)
        values = build_stack(
            lambda i: jax.tree.map(lambda x, to: x.astype(to), init_layer(number(i)), kept),
            size,
            nnx.to_pure_dict(leaves, lambda leaf: _on_host(placement, _dims(leaf))),
            _row_shardings(leaves),
        )
    else:
        values = jax.vmap(init_layer)(jnp.asarray(numbers, jnp.int32))
    segment = nnx.merge(graphdef, values)
    for _, variable in nnx.to_flat_state(nnx.state(segment, nnx.Param)):
        dims = variable.get_metadata().get("out_sharding") or (None,) * (variable.ndim - (size > 1))
        stacked = dims if size == 1 else ("layers", *dims)
        variable.set_metadata(
            out_sharding=stacked,
            first_layer=first_row,
            total_layers=total,
            span=(before + numbers[0], before + numbers[-1]),
            placement=placement,
            resident=not decays(dims),
        )
    return segment


def _on_host(placement: Placement, dims: Dims) -> bool:
    """Whether a parameter of these dims is in host memory, as `ParamInfo.on_host` says it."""
    return (placement.params_on_host or "experts" in dims) and decays(dims)


def _row_shardings(leaves: Any) -> Any:
    """Shardings of one layer's parameters at rest; None on a single device."""
    bound = current()
    if bound is None or bound.single:
        return None

    def of(variable: Any) -> NamedSharding:
        spec = resolve(bound, "params", _dims(variable), variable.shape, name="layer")
        return NamedSharding(bound.mesh, spec)

    return nnx.to_pure_dict(leaves, of)


def _dims(variable: Any) -> Dims:
    """Names of one layer's dims, None where it gives none."""
    return variable.get_metadata().get("out_sharding") or (None,) * variable.ndim
