"""A global batch cut into microbatches."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import InputError, PlanError
from colossax.sharding import batch_axes, constrain
from colossax.typing import TEXT_BATCH_DIMS, Batch, Dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A global batch cut up.

    Attributes:
        arrays: Each `[count, rows, ...]`.
        keys: A random key for each, `[count]`.
        count: How many there are.
        dims: Logical dims of each array, that of the count left out.
        term_weights: Weight of each term of the loss in the whole global batch; None where there
            is one microbatch, whose own they are.
    """

    arrays: Batch
    keys: Array
    count: int
    dims: Mapping[str, Dims]
    term_weights: dict[str, Array] | None = None

    @property
    def first(self) -> tuple[Batch, Array]:
        """The first microbatch and its key."""
        return jax.tree.map(lambda x: x[0], (self.arrays, self.keys))

    @property
    def last(self) -> tuple[Batch, Array]:
        """The last microbatch and its key."""
        return jax.tree.map(lambda x: x[-1], (self.arrays, self.keys))


def batch_dims(batch: Batch, declared: Mapping[str, Dims] | None) -> dict[str, Dims]:
    """Logical dims of each array: declared, those of text, or batch first and the rest unsharded.

    Raises:
        InputError: An array has no batch dim, or other dims than declared.
    """
    all_dims = {}
    for name, x in batch.items():
        dims = (declared or {}).get(name, TEXT_BATCH_DIMS.get(name, ()))
        if name not in (declared or {}) and len(dims) != x.ndim:
            dims = ("batch",) + (None,) * (x.ndim - 1)
        if len(dims) != x.ndim or "batch" not in dims:
            raise InputError(
                f"batch '{name}': shape {x.shape} does not fit dims {dims}; every array needs a"
                f" dim 'batch', and batch_dims one name (or None) per dim"
            )
        all_dims[name] = dims
    return all_dims


def num_microbatches(bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims]) -> int:
    """How many microbatches the plan cuts a global batch into.

    Raises:
        PlanError: They and the devices do not divide it, with the sizes and what would.
        InputError: It has no rows.
    """
    axes = sorted(batch_axes(bound))
    devices = bound.size(axes)
    wanted = bound.plan.batch
    count = wanted.accumulation
    for name, x in batch.items():
        rows = x.shape[dims[name].index("batch")]
        if not rows:
            raise InputError(f"batch '{name}': it has no rows; give one or more")
        if wanted.microbatch is not None:
            if rows % (wanted.microbatch * devices):
                raise PlanError(
                    f"batch '{name}': {rows} rows cannot be cut into microbatches of"
                    f" {wanted.microbatch} for each of {devices} devices along {axes};"
                    f" use a multiple of {wanted.microbatch * devices}, or another microbatch"
                )
            each = rows // (wanted.microbatch * devices)
            if name != next(iter(batch)) and each != count:
                raise PlanError(
                    f"batch '{name}': {rows} rows are {each} microbatches, other arrays are"
                    f" {count}; with batch.microbatch give all arrays the same rows"
                )
            count = each
        elif rows % (count * devices):
            raise PlanError(
                f"batch '{name}': {rows} rows cannot be cut into {count} microbatches"
                f"{f' for {devices} devices along {axes}' if devices > 1 else ''};"
                f" use a multiple of {count * devices}"
            )
    return count


def cut_up(bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims], key: Array) -> Microbatches:
    """A global batch as microbatches with a key for each; weights of terms are still to be found.

    Raises:
        PlanError: The plan's microbatches and the devices do not divide it.
    """
    count = num_microbatches(bound, batch, dims)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    return Microbatches(arrays=strided(batch, dims, count), keys=keys, count=count, dims=dims)


def strided(batch: Batch, dims: Mapping[str, Dims], count: int) -> Batch:
    """Each array as `[count, rows, ...]`; microbatch j takes rows j, j + count, ...

    Cut this way every device keeps its own rows; consecutive blocks would move them.
    """

    def cut(name: str, x: Array) -> Array:
        at = dims[name].index("batch")
        shape = (*x.shape[:at], x.shape[at] // count, count, *x.shape[at + 1 :])
        return constrain(jnp.moveaxis(x.reshape(shape), at + 1, 0), None, *dims[name])

    return {name: cut(name, x) for name, x in batch.items()}
