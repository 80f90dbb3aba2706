"""A global batch cut into microbatches."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.errors import InputError, PlanError
from colossax.sharding import batch_axes, constrain
from colossax.typing import TEXT_BATCH_DIMS, Batch, Dims


def batch_dims(batch: Batch, declared: Mapping[str, Dims] | None) -> dict[str, Dims]:
    """Logical dims of each array: declared, those of text, or batch first and the rest whole.

    Raises:
        InputError: An array has no batch dim, or other dims than declared.
    """
    found = {}
    for name, x in batch.items():
        dims = (declared or {}).get(name, TEXT_BATCH_DIMS.get(name, ()))
        if name not in (declared or {}) and len(dims) != x.ndim:
            dims = ("batch",) + (None,) * (x.ndim - 1)
        if len(dims) != x.ndim or "batch" not in dims:
            raise InputError(
                f"batch '{name}': shape {x.shape} does not fit dims {dims}; every array needs a"
                f" dim 'batch', and batch_dims one name (or None) per dim"
            )
        found[name] = dims
    return found


def microbatches(bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims]) -> int:
    """How many microbatches the plan cuts a global batch into.

    Raises:
        PlanError: They and the devices do not divide it, with the sizes and what would.
    """
    axes = sorted(batch_axes(bound))
    devices = bound.size(axes)
    wanted = bound.plan.batch
    pieces = wanted.accumulation
    for name, x in batch.items():
        rows = x.shape[dims[name].index("batch")]
        if wanted.microbatch is not None:
            if rows % (wanted.microbatch * devices):
                raise PlanError(
                    f"batch '{name}': {rows} rows cannot be cut into microbatches of"
                    f" {wanted.microbatch} for each of {devices} devices along {axes};"
                    f" use a multiple of {wanted.microbatch * devices}, or another microbatch"
                )
            each = rows // (wanted.microbatch * devices)
            if name != next(iter(batch)) and each != pieces:
                raise PlanError(
                    f"batch '{name}': {rows} rows are {each} microbatches, other arrays are"
                    f" {pieces}; with batch.microbatch give all arrays the same rows"
                )
            pieces = each
        elif rows % (pieces * devices):
            raise PlanError(
                f"batch '{name}': {rows} rows cannot be cut into {pieces} microbatches for"
                f" {devices} devices along {axes};"
                f" use a multiple of {pieces * devices}"
            )
    return pieces


def cut_up(
    batch: Batch, dims: Mapping[str, Dims], key: Array, pieces: int
) -> tuple[Batch, Array, Batch]:
    """Microbatches `[pieces, rows, ...]`, a key for each, and the first of them."""
    micro = divided(batch, dims, pieces)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(pieces))
    return micro, keys, jax.tree.map(lambda x: x[0], micro)


def divided(batch: Batch, dims: Mapping[str, Dims], pieces: int) -> Batch:
    """Each array as `[pieces, rows, ...]`; microbatch j takes rows j, j + pieces, ...

    Cut this way every device keeps its own rows; consecutive blocks would move them.
    """

    def cut(name: str, x: Array) -> Array:
        at = dims[name].index("batch")
        shape = (*x.shape[:at], x.shape[at] // pieces, pieces, *x.shape[at + 1 :])
        return constrain(jnp.moveaxis(x.reshape(shape), at + 1, 0), None, *dims[name])

    return {name: cut(name, x) for name, x in batch.items()}
