"""How a step takes its batches: in its order, checked, and on its devices."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.sharding import NATURAL, RowOrder, activation_sharding, balanced_order
from colossax.step.arrange import Arranged, arranged, check_segments, filled_up, row_length
from colossax.step.checks.given import check_tokens, host_array
from colossax.step.microbatches import batch_dims, check_microbatches, num_microbatches
from colossax.typing import FRAMES, SOURCE, Batch, Dims


class BatchPlacer:
    """Brings batches of one form, that of the first, to a step's devices; or of any form."""

    def __init__(
        self,
        bound: BoundPlan,
        dims: Mapping[str, Dims] | None,
        *,
        any_order: bool,
        any_form: bool = False,
        known: Mapping[str, int] = {},
    ):
        """Place nothing yet.

        Args:
            bound: Plan and devices.
            dims: Logical dims of arrays that are not text.
            any_order: Whether the loss may see tokens in any order.
            any_form: Whether batches may differ in form.
            known: Numbers that the model knows, see `known_to`.
        """
        self._bound = bound
        self._dims = dims
        self.any_order = any_order
        self._any_form = any_form
        self.known = known
        self._declared: dict[type, dict[str, tuple]] = {}
        self._shardings: dict[type, dict[str, NamedSharding]] = {}

    def place(self, batch: Batch) -> Batch:
        """A global batch on the devices: host arrays whole on every process, or global ones.

        Device arrays stay where they are; for stages with programs of their own, those that lie
        otherwise than the plan has them are copied. Tokens of host arrays are brought into the
        order of the plan here, once; those of device arrays inside the step.

        Raises:
            InputError: It is no mapping of arrays by name, has no rows, shapes or dtypes are not
                those of the first batch, tokens are not the model's, or documents are not numbered
                in their order.
            PlanError: Microbatches and devices do not divide it.
        """
        placed = isinstance(batch, Mapping) and batch and all(map(_placed, batch.values()))
        if not placed:
            batch = as_arrays(batch)
            if not isinstance(batch, Arranged):
                check_tokens(batch, self.known)
                check_segments(batch)
                batch = self.arrange(batch)
        form = {name: (x.shape, x.dtype) for name, x in batch.items()}
        if form != self._declared.get(type(batch)):
            self._declare(batch, form)
        apart = self._bound.stage_programs
        if placed and not apart:
            return batch
        shardings = self._shardings[type(batch)]
        placed_arrays = {
            # One program lays out what it gets; several each take their own devices' shards.
            name: (_laid_out(x, shardings[name]) if apart else x)
            if _placed(x)
            else _put(x, shardings[name])
            for name, x in batch.items()
        }
        return (
            Arranged(placed_arrays, batch.order) if isinstance(batch, Arranged) else placed_arrays
        )

    def order(self, length: int) -> RowOrder:
        """The order in which the step wants rows of this many tokens.

        A loss that may see tokens in any order (`any_order`) gets them in the one that spreads
        causal attention evenly over a ring; another one in their own.

        Raises:
            PlanError: The row is too short for the devices that are to share it.
        """
        return balanced_order(self._bound, length) if self.any_order else NATURAL

    def arrange(self, batch: Batch) -> Batch:
        """Arrays in natural order brought into the step's, on the host or in a trace."""
        dims = batch_dims(batch, self._dims)
        length = row_length(batch, dims)
        if FRAMES in batch or (length is None and SOURCE in batch):
            return filled_up(batch, dims, self.order)  # a source has an order of its own
        if length is None:
            return batch
        order = self.order(length)
        return batch if order == NATURAL else arranged(batch, dims, order)

    def abstract(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Batch:
        """A global batch without its numbers, in order and laid out: for `Step.lower`."""
        batch = jax.eval_shape(self.arrange, dict(shapes))
        dims = batch_dims(batch, self._dims)

        def placed(name: str, x: Any) -> jax.ShapeDtypeStruct:
            sharding = activation_sharding(self._bound, dims[name], x.shape, name=f"batch '{name}'")
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        arrays = {name: placed(name, x) for name, x in batch.items()}
        return Arranged(arrays, batch.order) if isinstance(batch, Arranged) else arrays

    def _declare(self, batch: Batch, form: dict[str, tuple]) -> None:
        first = None if self._any_form else self._declared.get(type(batch))
        if first is not None:
            first, other = (
                {name: f"{dtype}{list(shape)}" for name, (shape, dtype) in each.items()}
                for each in (first, form)
            )
            raise InputError(
                f"batch: {other} differs from what the step was compiled for, {first};"
                f" pad or convert the batch, or make a second step for the other form"
            )
        # Device arrays are arranged, and filled up, inside the step.
        inside = batch if isinstance(batch, Arranged) else jax.eval_shape(self.arrange, batch)
        dims = batch_dims(inside, self._dims)
        check = num_microbatches if self._any_form else check_microbatches
        check(self._bound, inside, dims)
        self._shardings[type(batch)] = {
            name: activation_sharding(self._bound, dims[name], x.shape, name=f"batch '{name}'")
            for name, x in inside.items()
        }
        self._declared[type(batch)] = form

    def in_order(self, batch: Batch) -> tuple[Batch, RowOrder]:
        """The batch in the order of the step, as a plain dict."""
        if not isinstance(batch, Arranged):
            batch = self.arrange(batch)
        order = batch.order if isinstance(batch, Arranged) else NATURAL
        return dict(batch), order


def as_arrays(batch: Any) -> Batch:
    """The batch with what is not on devices as host arrays.

    Raises:
        InputError: It is no mapping of arrays by name.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"batch: found a {type(batch).__name__}; name its arrays, as in"
            ' step(state, {"x": x, "y": y}), and give boost the dims of those that are not text, as'
            ' batch_dims={"x": ("batch", None)}'
        )
    for name, x in batch.items():
        if isinstance(x, Mapping):
            raise InputError(
                f"batch '{name}': found a {type(x).__name__}; a batch holds arrays by name and no"
                " further mappings; give each a name of its own"
            )
    if not batch:
        raise InputError("batch: it holds no arrays; give them by name, as {'x': x, 'y': y}")
    arrays = {name: x if _placed(x) else host_array(name, x) for name, x in batch.items()}
    return Arranged(arrays, batch.order) if isinstance(batch, Arranged) else arrays


def _placed(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _laid_out(x: jax.Array, wanted: NamedSharding) -> jax.Array:
    """Where it is wanted; dims that devices do not divide stay whole, as they are filled up later.

    What lies so is as it was.
    """
    entries = zip(wanted.spec, x.shape, strict=False)
    spec = [None if size % _devices(wanted.mesh, entry) else entry for entry, size in entries]
    sharding = NamedSharding(wanted.mesh, PartitionSpec(*spec))
    return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)


def _devices(mesh: Any, entry: Any) -> int:
    """Of a dim, along the axes that its entry of a partition spec names."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[axis] for axis in axes)


def _put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
