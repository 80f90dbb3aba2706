"""A global batch cut into microbatches."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError, PlanError
from colossax.sharding import batch_axes, constrain
from colossax.typing import TOKEN_DIMS, Batch, Dims

PER_STAGE = 4
"""Microbatches for each stage, where a plan does not say how many."""

ROW_KEYS = "row_keys"
"""Array of a microbatch with the data of a random key for each row, where the loss draws."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the loss of a microbatch counts in that of the batch.

    Attributes:
        terms: Weight of each term of the loss in the whole global batch; None where there is one
            microbatch, whose own they are.
        loss_scale: By which gradients are multiplied; None: they are not.
    """

    # While JAX takes it apart, its leaves are other things than arrays.
    terms: Any = None
    loss_scale: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A global batch cut up.

    Attributes:
        arrays: Each `[count, rows, ...]`.
        keys: A random key for each, `[count]`.
        count: How many there are.
        dims: Logical dims of each array, that of the count left out.
        weighing: Of each in all of them.
    """

    arrays: Batch
    keys: Array
    count: int
    dims: Mapping[str, Dims]
    weighing: Weighing = Weighing()

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
        dims = (declared or {}).get(name, TOKEN_DIMS.get(name, ()))
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
    """How many microbatches the plan cuts a global batch into, those of a pipeline too.

    Raises:
        PlanError: They and the devices do not divide it, with the sizes and what would.
        InputError: It has no rows.
    """
    axes = sorted(batch_axes(bound))
    devices = bound.size(axes)
    wanted = bound.plan.batch
    count = wanted.accumulation * _pipelined(bound, batch, dims)
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
        elif rows % (count * devices) and not _fillable(bound, batch):
            raise PlanError(
                f"batch '{name}': {rows} rows cannot be cut into {count} microbatches"
                f"{f' for {devices} devices along {axes}' if devices > 1 else ''};"
                f" use a multiple of {count * devices}"
            )
    return count


def check_microbatches(bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims]) -> None:
    """Refuse a batch to train on that the plan cannot cut, or of which it says two numbers.

    A batch to evaluate on may have other rows, and as many microbatches as those need.

    Raises:
        PlanError: See `num_microbatches`; or what `batch.microbatch` gives is not what
            `pipeline.microbatches` says.
        InputError: It has no rows.
    """
    count, wanted = num_microbatches(bound, batch, dims), bound.plan.batch.microbatch
    asked = bound.plan.pipeline.microbatches
    if wanted is None or bound.mesh.shape[MeshAxis.STAGE] == 1 or asked in (None, count):
        return
    raise PlanError(
        f"plan: both batch.microbatch and pipeline.microbatches are given; {wanted} rows at a time"
        f" are {count} microbatches of this batch, not {asked}; one follows from the other, so give"
        " one and set the other to none"
    )


def _pipelined(bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims]) -> int:
    """Microbatches of a pipeline for each of those that the plan adds up; 1 where none is.

    Unless they are given, as many as divide a device's rows, up to four for each stage.
    """
    stages, wanted = bound.mesh.shape[MeshAxis.STAGE], bound.plan.batch
    if stages == 1 or wanted.microbatch is not None:
        return 1
    if bound.plan.pipeline.microbatches is not None:
        return bound.plan.pipeline.microbatches
    name, x = next(iter(batch.items()))
    devices = bound.size(sorted(batch_axes(bound))) * wanted.accumulation
    rows = x.shape[dims[name].index("batch")] // devices
    return next((n for n in range(min(PER_STAGE * stages, rows), 0, -1) if not rows % n), 1)


def row_unit(bound: BoundPlan) -> int:
    """Rows of which a global batch has a multiple, as far as the plan alone says."""
    wanted, count = bound.plan.batch, 1
    if bound.mesh.shape[MeshAxis.STAGE] > 1 and wanted.microbatch is None:
        count = bound.plan.pipeline.microbatches or 1
    each = wanted.microbatch or wanted.accumulation
    return bound.size(sorted(batch_axes(bound))) * each * count


def _fillable(bound: BoundPlan, batch: Batch) -> bool:
    """Whether rows of padding are added where a pipeline's microbatches do not divide it."""
    given = bound.plan.pipeline.microbatches is not None
    return given and bound.mesh.shape[MeshAxis.STAGE] > 1 and "weights" in batch


def _filled(
    bound: BoundPlan, batch: Batch, dims: Mapping[str, Dims]
) -> tuple[Batch, Mapping[str, Dims]]:
    """The batch, with rows of padding where the microbatches of a pipeline do not divide it.

    They have weight 0, and are told from tokens that no loss counts by `segments`.
    """
    rows = max(x.shape[dims[name].index("batch")] for name, x in batch.items())
    lacking = -rows % row_unit(bound)
    if not lacking or not _fillable(bound, batch):
        return batch, dims
    if "tokens" in batch and "segments" not in batch:
        batch = {**batch, "segments": jnp.zeros(batch["tokens"].shape, jnp.int32)}
        dims = {**dims, "segments": dims["tokens"]}

    def longer(name: str, x: Array) -> Array:
        at = dims[name].index("batch")
        last = jax.lax.slice_in_dim(x, x.shape[at] - 1, x.shape[at], axis=at)
        more = jnp.repeat(last, lacking, axis=at)
        more = jnp.full_like(more, _OF_PADDING[name]) if name in _OF_PADDING else more
        return constrain(jnp.concatenate([x, more], axis=at), *dims[name])

    return {name: longer(name, x) for name, x in batch.items()}, dims


_OF_PADDING = {"weights": 0, "segments": -1}
"""What arrays have in rows that do not count."""


def cut_up(
    bound: BoundPlan,
    batch: Batch,
    dims: Mapping[str, Dims],
    key: Array,
    *,
    by_row: bool = False,
    loss_scale: Any = None,
) -> Microbatches:
    """A global batch as microbatches with a key for each; weights of terms are still to be found.

    Args:
        bound: Plan and devices.
        batch: All of it.
        dims: Of its arrays.
        key: Of the step.
        by_row: Whether rows get keys too, which do not depend on the microbatch they come to.
        loss_scale: See `Weighing`.

    Raises:
        PlanError: The plan's microbatches and the devices do not divide it.
    """
    batch, dims = _filled(bound, batch, dims)
    if by_row:
        name, x = next(iter(batch.items()))
        rows = jnp.arange(x.shape[dims[name].index("batch")])
        of_rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        batch = {**batch, ROW_KEYS: jax.random.key_data(of_rows)}
        dims = {**dims, ROW_KEYS: ("batch", None)}
    count = num_microbatches(bound, batch, dims)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    return Microbatches(
        arrays=strided(batch, dims, count),
        keys=keys,
        count=count,
        dims=dims,
        weighing=Weighing(loss_scale=loss_scale),
    )


def strided(batch: Batch, dims: Mapping[str, Dims], count: int) -> Batch:
    """Each array as `[count, rows, ...]`; microbatch j takes rows j, j + count, ...

    Cut this way every device keeps its own rows; consecutive blocks would move them.
    """

    def cut(name: str, x: Array) -> Array:
        at = dims[name].index("batch")
        shape = (*x.shape[:at], x.shape[at] // count, count, *x.shape[at + 1 :])
        return constrain(jnp.moveaxis(x.reshape(shape), at + 1, 0), None, *dims[name])

    return {name: cut(name, x) for name, x in batch.items()}
