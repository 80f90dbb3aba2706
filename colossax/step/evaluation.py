"""Terms and metrics of a batch, without a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import InputError
from colossax.layerwise import Maximum, summed
from colossax.sharding import in_order, use
from colossax.step.arrange import Arranged
from colossax.step.batches import BatchPlacer, as_arrays
from colossax.step.gradients.accumulate import LossCall, check_counted
from colossax.step.loss import SCALAR, Totals
from colossax.step.microbatches import batch_dims, cut_up, num_microbatches, row_unit, strided
from colossax.step.programs import StageUpdate
from colossax.step.stages import forward_table, pipelined_totals
from colossax.typing import Batch, Dims, Params, TrainState

if TYPE_CHECKING:
    from colossax.step.step import Step


class Evaluation:
    """Terms and metrics of batches of any number of rows, compiled once for each form."""

    def __init__(self, step: "Step", compiler_options: Any):
        """Compile nothing yet.

        Args:
            step: Its loss, plan and preparation are there.
            compiler_options: For the devices' compiler.
        """
        self._step = step
        dims, of_steps = step.options.batch_dims, step.batches
        self._batches = BatchPlacer(
            step.bound, dims, any_order=of_steps.any_order, any_form=True, known=of_steps.known
        )
        self._jitted: Any = jax.jit(self._totals, compiler_options=compiler_options)
        self.trace = self._jitted.trace
        """As that of `jax.jit`, of `(params, variables, batch)`."""
        if isinstance(step.updater, StageUpdate):
            self._jitted = step.updater.totals(self._batches, compiler_options)

    def __call__(self, state: TrainState, batch: Batch) -> Totals:
        """Totals of the rows that were given; where devices do not divide them, rows are added.

        Those are copies of the last one. As many copies as the batch then has rows tell what to
        take off again: right for what is added up over rows, and for the quotient of a mean.

        Raises:
            InputError: Rows are added, and the loss is one number or compares rows; or it is no
                batch.
        """
        batch = as_arrays(batch)
        added = self._lacking(batch)
        if added and self._step.loss_call.whole_batch:
            raise InputError(
                f"loss: it compares each row of a batch with all others, the {added} rows that fill"
                f" the batch up to a multiple of {self._unit} among them; give such a multiple of"
                " rows"
            )
        totals = self._of(state, _lengthened(batch, self._dims(batch), added))
        if not added:
            return totals
        if SCALAR in totals:
            raise InputError(
                f"loss: it is one number, in which the {added} rows that fill the batch up to a"
                f" multiple of {self._unit} would count; return"
                " ({'error': (sum, count, 1.0)}, {}), or give such a multiple of rows"
            )
        dims = self._dims(batch)
        rows = _rows(batch, dims) + added
        copies = self._of(state, _copies(batch, dims, rows))
        return {name: _without(totals[name], copies[name], added, rows) for name in totals}

    @property
    def _unit(self) -> int:
        """Rows of which a batch has a multiple."""
        return row_unit(self._step.bound)

    def _lacking(self, batch: Batch) -> int:
        """Rows to be added; none where arrays differ in theirs, which is refused later."""
        dims = self._dims(batch)
        counts = {x.shape[dims[name].index("batch")] for name, x in batch.items()}
        return -counts.pop() % self._unit if len(counts) == 1 else 0

    def _dims(self, batch: Batch) -> Mapping[str, Dims]:
        return batch_dims(batch, self._step.options.batch_dims)

    def _of(self, state: TrainState, batch: Batch) -> Totals:
        return self._jitted(state["params"], state["variables"], self._batches.place(batch))

    def _totals(self, params: Any, variables: Any, batch: Batch) -> Totals:
        batch, order = self._batches.in_order(batch)
        bound = self._step.bound
        with use(bound), in_order(order):
            batch = self._step.prepared(params, variables, batch)
            dims = self._dims(batch)
            if bound.mesh.shape[MeshAxis.STAGE] > 1:
                return self._through_stages(params, batch, dims, variables)
            return batch_totals(self._step.loss_call, bound, params, batch, dims, variables)

    def _through_stages(self, params: Any, batch: Batch, dims: Any, variables: Any) -> Totals:
        step, bound = self._step, self._step.bound
        micro = cut_up(bound, batch, dims, jax.random.key(0))
        table = forward_table(bound, micro.count)
        infos = step.spec.infos
        return pipelined_totals(step.loss_call, bound, infos, params, variables, micro, table)


def _rows(batch: Batch, dims: Mapping[str, Dims]) -> int:
    name, x = next(iter(batch.items()))
    return x.shape[dims[name].index("batch")]


def _lengthened(batch: Batch, dims: Mapping[str, Dims], added: int) -> Batch:
    """The batch with its last row that many times more."""
    if not added:
        return batch

    def longer(x: Any, last: Any, at: int) -> Any:
        library = jnp if isinstance(x, jax.Array) else np
        return library.concatenate([x, library.repeat(last, added, axis=at)], axis=at)

    return _with_last(batch, dims, longer)


def _copies(batch: Batch, dims: Mapping[str, Dims], count: int) -> Batch:
    """The last row alone, that many times."""

    def repeated(x: Any, last: Any, at: int) -> Any:
        return (jnp if isinstance(x, jax.Array) else np).repeat(last, count, axis=at)

    return _with_last(batch, dims, repeated)


def _with_last(batch: Batch, dims: Mapping[str, Dims], make: Any) -> Batch:
    """Each array as `make(array, its last row, batch dim)`."""
    arrays = {}
    for name, x in batch.items():
        at = dims[name].index("batch")
        arrays[name] = make(x, x[(slice(None),) * at + (slice(-1, None),)], at)
    return Arranged(arrays, batch.order) if isinstance(batch, Arranged) else arrays


def _without(value: Any, copies: Any, added: int, rows: int) -> Any:
    """What was added up less that of the added rows; a maximum they do not change."""
    if isinstance(value, Maximum):
        return value

    def less(x: Any, more: Any) -> Any:
        # Multiplied first: counts below 2^24 stay whole numbers. Infinite stays infinite.
        return jnp.where(jnp.isfinite(more), x - more * added / rows, x)

    return jax.tree.map(less, value, copies)


def batch_totals(
    call: LossCall,
    bound: BoundPlan,
    params: Params,
    batch: Batch,
    dims: Mapping[str, Dims],
    variables: Any,
) -> Totals:
    """Terms and metrics of a global batch as (total, weight), microbatch after microbatch.

    The loss gets no random key: it is asked what the model knows, not to train it.

    Raises:
        InputError: The loss is one number, and there are several microbatches.
    """

    def one(microbatch: Batch) -> Totals:
        terms, metrics = call(params, microbatch, variables, None)
        check_counted(call, terms, count)
        return {**{name: term[:2] for name, term in terms.items()}, **metrics}

    count = num_microbatches(bound, batch, dims)
    arrays = strided(batch, dims, count)
    if count == 1:
        return one(jax.tree.map(lambda x: x[0], arrays))
    return summed(jax.lax.map(one, arrays))
