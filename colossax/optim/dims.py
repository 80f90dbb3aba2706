"""What the names of a parameter's dims mean to an optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from colossax.errors import InputError
from colossax.typing import Dims

UNIT_DIMS = frozenset({"layers", "stages", "experts"})
"""Dims that line up independent parameters of one shape; everything else belongs to one of them."""


def is_unit_dim(dim: str | None) -> bool:
    """Whether a dim (its phase aside) counts parameters instead of belonging to one."""
    return dim is not None and dim.split(":")[0] in UNIT_DIMS


def decays(dims: Dims) -> bool:
    """Whether weight decay applies: to matrices and tables, not to norms and biases.

    A parameter decays if, in one layer and one expert, it has at least two dims. `head_dim` counts
    together with the heads beside it: a bias `(heads, head_dim)` is a vector cut in pieces.
    """
    weight_dims = [dim for dim in dims if not is_unit_dim(dim)]
    return len([dim for dim in weight_dims if dim is None or dim.split(":")[0] != "head_dim"]) >= 2


def sides(dims: Dims) -> list[tuple[int, ...]]:
    """Which dims stand for one side of a parameter: numbers of dims, side by side, in order.

    Unit dims are of none. A `head_dim` is of one side with what stands before it, so `embed heads
    head_dim` has the sides `embed` and `heads head_dim`: two sides make a matrix, one a vector.
    """
    found: list[tuple[int, ...]] = []
    for at, dim in enumerate(dims):
        if is_unit_dim(dim):
            continue
        if dim is not None and dim.split(":")[0] == "head_dim" and found:
            found[-1] = (*found[-1], at)
        else:
            found.append((at,))
    return found


def is_hidden_matrix(dims: Dims) -> bool:
    """Whether a parameter is a matrix that is neither embedding nor head."""
    return len(sides(dims)) == 2 and not any(_is_of_tokens(dim) for dim in dims)


def _is_of_tokens(dim: str | None) -> bool:
    return dim is not None and (dim.split(":")[0] in ("vocab", "scores") or dim == "embed:table")


def unit_axes(dims: Dims) -> tuple[int, ...]:
    """Numbers of the dims that count parameters."""
    return tuple(at for at, dim in enumerate(dims) if is_unit_dim(dim))


def decay_mask(dims: Any) -> Any:
    """`decays` of every leaf of a tree of dims."""
    return jax.tree.map(decays, dims, is_leaf=is_dims)


def unit_norms(x: Array, dims: Dims) -> Float[Array, "..."]:
    """Euclidean norm of each unit, in float32; unit dims keep their size, the others become 1.

    On a sharded array inside `jit` the compiler adds the partial sums of all shards: for every dim
    of a unit that is split, one all-reduce of as many float32 as a device has units of the leaf.
    """
    axes = tuple(i for i, dim in enumerate(dims) if not is_unit_dim(dim))
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))


def map_with_dims(fn: Callable[..., Any], dims: Any, tree: Any, *rest: Any) -> Any:
    """`fn(dims_of_leaf, leaf, *rest_leaves)` over a tree of parameters.

    Raises:
        InputError: `dims` lacks a leaf of the tree, has one too many, or one of another rank.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    by_name = dict(_flat_dims(dims))
    if set(by_name) != set(names):
        odd = sorted(set(by_name) ^ set(names))[0]
        lacks, has = ("dims", "parameters") if odd in names else ("parameters", "dims")
        raise InputError(
            f"optimizer: '{odd}' is among the {has} but not among the {lacks}; make the optimizer"
            " from the dims of the parameters it gets"
        )
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if len(by_name[name]) != jnp.ndim(leaf):
            raise InputError(
                f"optimizer: '{name}' has {jnp.ndim(leaf)} dims but {len(by_name[name])} names"
                f" {by_name[name]}; give one name (or None) to each dim"
            )
    columns = [structure.flatten_up_to(other) for other in rest]
    rows = zip(names, leaves, *columns, strict=True)
    return structure.unflatten([fn(by_name[name], leaf, *more) for name, (_, leaf), *more in rows])


def is_dims(leaf: Any) -> bool:
    """Whether an entry of a tree of dims is the dims of a parameter."""
    return isinstance(leaf, tuple)


def _flat_dims(dims: Any) -> list[tuple[str, Dims]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(dims, is_leaf=is_dims)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
