"""Loss and gradients of one global batch, whole or in microbatches."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from colossax.compat import inputs_used
from colossax.config import AttentionConfig, BoundPlan, Rules
from colossax.errors import InputError, PlanError
from colossax.sharding import batch_axes, constrain, param_sharding, use
from colossax.train.loss import Loss, Sums, Terms
from colossax.typing import TEXT_BATCH_DIMS, Batch, Dims, Params

RESERVED = frozenset({"loss", "grad_norm", "tokens", "skipped"})
"""Names of the step's own metrics."""

Totals = dict[str, tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCall:
    """A loss with its model's structure: parameters in, numbers out.

    Attributes:
        merge: Parameters to model.
        loss: See `Loss`.
    """

    merge: Callable[[Params], Any]
    loss: Loss

    def __call__(
        self, params: Params, batch: Batch, variables: Any, key: Array | None
    ) -> tuple[Terms, Sums]:
        """Terms and metrics of one microbatch, all as float32 scalars.

        Raises:
            InputError: The loss returns something else.
        """
        names = inspect.signature(self.loss).parameters
        given = {"variables": variables, "key": key}
        wanted = {name: value for name, value in given.items() if name in names}
        result = self.loss(self.merge(params), batch, **wanted)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)):
            raise InputError(
                "loss: expected ({term: (total, weight, coefficient)}, metrics),"
                f" found {type(result).__name__}; return totals over tokens and their weights"
            )
        terms, metrics = result
        taken = {*RESERVED, *terms}
        clash = sorted(taken.intersection(metrics) | RESERVED.intersection(terms))
        if clash or not terms:
            raise InputError(
                f"loss: it names {clash or 'no terms'}; give at least one term, each term and"
                f" metric a name of its own, none of them in {sorted(RESERVED)}"
            )
        terms = {name: _sums(name, term, 3) for name, term in terms.items()}
        return terms, {name: _sums(name, pair, 2) for name, pair in metrics.items()}


def _sums(name: str, value: Any, length: int) -> Any:
    """Total and weight as float32 scalars, and what follows."""
    if not (isinstance(value, tuple) and len(value) == length):
        form = ("total", "weight", "coefficient")[:length]
        raise InputError(f"loss: '{name}' is {value!r}; give ({', '.join(form)})")
    return _scalar(name, value[0]), _scalar(name, value[1]), *value[2:]


def _scalar(name: str, value: Any) -> Array:
    if jnp.shape(value) != ():
        raise InputError(
            f"loss: '{name}' has shape {jnp.shape(value)} where one number belongs;"
            f" sum it over the tokens"
        )
    return jnp.asarray(value, jnp.float32)


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


def loss_and_gradients(
    call: LossCall,
    bound: BoundPlan,
    infos: Any,
    params: Params,
    frozen: Params,
    batch: Batch,
    dims: Mapping[str, Dims],
    variables: Any,
    key: Array,
) -> tuple[Params, Totals, Totals, Array]:
    """Gradients of the loss over the whole global batch, laid out by the plan's gradient rules.

    Every term is divided by its own weight summed over all microbatches, so the result does not
    depend on how the batch is cut. The weights come first, in a pass from which everything that
    parameters reach has been removed.

    Returns:
        Gradients (accumulation dtype), terms as (total, weight), metrics as (total, weight), loss.

    Raises:
        InputError: A weight depends on parameters.
    """
    pieces = microbatches(bound, batch, dims)
    micro, keys, first = cut_up(batch, dims, key, pieces)
    weigh = checked_weights(call, params, frozen, variables, first, keys[0])

    def value(params: Params, piece: Batch, key: Array, over: Any):
        return objective(*call(joined(params, frozen), piece, variables, key), over)

    differentiate = jax.value_and_grad(value, has_aux=True)
    if pieces == 1:
        (loss, (totals, metrics)), grads = differentiate(params, first, keys[0], None)
        return _accumulable(bound, infos, grads), totals, metrics, loss
    over = whole_weights(weigh, micro, keys)
    if bound.plan.batch.reduce_once and batch_axes(bound):
        return _reduced_once(bound, infos, differentiate, params, micro, dims, keys, over)

    def grad(piece: Batch, key: Array):
        (loss, (totals, metrics)), grads = differentiate(params, piece, key, over)
        return _accumulable(bound, infos, grads), (totals, metrics, loss)

    grads, (totals, metrics, loss) = _summed_up(
        grad, lambda grads: _laid_out(bound, infos, grads), (micro, keys)
    )
    return grads, totals, metrics, loss


def cut_up(
    batch: Batch, dims: Mapping[str, Dims], key: Array, pieces: int
) -> tuple[Batch, Array, Batch]:
    """Microbatches `[pieces, rows, ...]`, a key for each, and the first of them."""
    micro = _microbatches(batch, dims, pieces)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(pieces))
    return micro, keys, jax.tree.map(lambda x: x[0], micro)


def objective(terms: Terms, metrics: Sums, over: Any) -> tuple[Any, tuple[Totals, Totals]]:
    """The loss of a microbatch, and its terms and metrics as (total, weight).

    Args:
        terms: What the loss gave.
        metrics: Likewise.
        over: Weights of the terms in the whole global batch; None: this is all of it.
    """
    own = {name: jax.lax.stop_gradient(weight) for name, (_, weight, _) in terms.items()}
    over = own if over is None else over
    parts = [
        coefficient * total / jnp.where(over[name] > 0, over[name], 1.0)
        for name, (total, _, coefficient) in terms.items()
    ]
    totals = {name: (total, own[name]) for name, (total, _, _) in terms.items()}
    return sum(parts), (totals, dict(metrics))


def _summed_up(grad: Callable, lay: Callable, xs: Any) -> tuple[Params, Any]:
    """`grad(*x) -> (gradients, sums)` added over the microbatches."""

    def body(acc: Any, x: Any):
        acc = jax.tree.map(jnp.add, acc, grad(*x))
        # Without this the accumulator may be kept whole on every device and reduced every time.
        return (lay(acc[0]), acc[1]), None

    shapes = jax.eval_shape(grad, *jax.tree.map(lambda x: x[0], xs))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, (lay(zeros[0]), zeros[1]), xs)[0]


def _reduced_once(
    bound: BoundPlan,
    infos: Any,
    differentiate: Callable,
    params: Params,
    micro: Batch,
    dims: Mapping[str, Dims],
    keys: Array,
    over: Any,
) -> tuple[Params, Totals, Totals, Array]:
    """Every device accumulates the gradients of its own rows; they are summed at the end.

    The devices along the batch become a dim in front of all arrays, and the plan in force inside
    does not know of them.
    """
    axes = tuple(axis for axis in bound.mesh.axis_names if axis in batch_axes(bound))
    inside = bound.replace(rules=_without(bound.plan.rules, axes), attention=_batchable(bound))
    shards = bound.size(axes)

    def split(name: str, x: Array) -> Array:
        at = dims[name].index("batch") + 1
        x = x.reshape(*x.shape[:at], shards, x.shape[at] // shards, *x.shape[at + 1 :])
        return _along(bound, axes, jnp.moveaxis(x, at, 1), 1)

    def grad(piece: Batch, key: Array):
        def own(piece: Batch, key: Array):
            with use(inside):
                (loss, (totals, metrics)), grads = differentiate(params, piece, key, over)
            return _accumulable(inside, infos, grads, lay=False), (totals, metrics, loss)

        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shards))
        grads, sums = jax.vmap(own, spmd_axis_name=axes)(piece, keys)
        return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def lay(grads: Params) -> Params:
        return jax.tree.map(lambda g, info: _whole(bound, axes, g, info), grads, infos)

    pieces = {name: split(name, x) for name, x in micro.items()}
    grads, (totals, metrics, loss) = _summed_up(grad, lay, (pieces, keys))
    dtype = jnp.dtype(bound.plan.precision.reduction or bound.plan.precision.accumulation)
    summed = jax.tree.map(lambda g: _sum_devices(g, dtype), grads)
    return _accumulable(bound, infos, summed), totals, metrics, loss


def _batchable(bound: BoundPlan) -> AttentionConfig:
    """An attention that can stand under `vmap`: cuDNN's takes no mask there."""
    attention = bound.plan.attention
    return dataclasses.replace(attention, kernel="xla") if attention.kernel == "auto" else attention


def _without(rules: Rules, axes: tuple[str, ...]) -> Rules:
    """Rules that do not know these mesh axes."""

    def less(choices: Any) -> Any:
        return tuple(tuple(axis for axis in choice if axis not in axes) for choice in choices)

    return Rules(
        **{
            field.name: {d: less(choices) for d, choices in getattr(rules, field.name).items()}
            for field in dataclasses.fields(rules)
        }
    )


def _sum_devices(grad: Array, dtype: Any) -> Array:
    """Sum over dim 0 in this dtype; `jnp.sum` would widen bfloat16 before it is sent."""
    return jax.lax.reduce(grad.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))


def _along(bound: BoundPlan, axes: tuple[str, ...], x: Array, at: int) -> Array:
    spec = PartitionSpec(*[None] * at, axes)
    return jax.lax.with_sharding_constraint(x, NamedSharding(bound.mesh, spec))


def _whole(bound: BoundPlan, axes: tuple[str, ...], grad: Array, info: Any) -> Array:
    """`[devices along the batch, *parameter]`: each holds its own, whole but for other axes."""
    rest = param_sharding(bound, "weights", info).spec
    spec = PartitionSpec(axes, *rest)
    return jax.lax.with_sharding_constraint(grad, NamedSharding(bound.mesh, spec))


def _accumulable(bound: BoundPlan, infos: Any, grads: Params, *, lay: bool = True) -> Params:
    """Gradients in the dtype and the layout in which they are accumulated."""
    dtype = bound.plan.precision.accumulation
    grads = jax.tree.map(lambda g: g.astype(dtype), grads)
    return _laid_out(bound, infos, grads) if lay else grads


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
    """

    def one(piece: Batch) -> Totals:
        terms, metrics = call(params, piece, variables, None)
        return {**{name: term[:2] for name, term in terms.items()}, **metrics}

    pieces = microbatches(bound, batch, dims)
    micro = _microbatches(batch, dims, pieces)
    if pieces == 1:
        return one(jax.tree.map(lambda x: x[0], micro))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one, micro))


def _microbatches(batch: Batch, dims: Mapping[str, Dims], pieces: int) -> Batch:
    """Each array as `[pieces, rows, ...]`; microbatch j takes rows j, j + pieces, ...

    Cut this way every device keeps its own rows; consecutive blocks would move them.
    """

    def cut(name: str, x: Array) -> Array:
        at = dims[name].index("batch")
        shape = (*x.shape[:at], x.shape[at] // pieces, pieces, *x.shape[at + 1 :])
        return constrain(jnp.moveaxis(x.reshape(shape), at + 1, 0), None, *dims[name])

    return {name: cut(name, x) for name, x in batch.items()}


def checked_weights(
    call: LossCall, params: Params, frozen: Params, variables: Any, piece: Batch, key: Array
) -> Callable[[Batch, Array], dict[str, Array]]:
    """`(piece, key) -> {term: weight}`, from a forward pass that needs no parameter.

    Raises:
        InputError: A weight depends on parameters.
    """

    def weigh(params: Params, piece: Batch, key: Array) -> dict[str, Array]:
        terms, _ = call(joined(params, frozen), piece, variables, key)
        return {name: weight for name, (_, weight, _) in terms.items()}

    used = inputs_used(weigh, params, piece, key)
    count = len(jax.tree.leaves(params))
    if any(used[:count]):
        raise InputError(
            "loss: the weight of a term depends on parameters, which would make its gradient wrong;"
            " compute weights from the batch alone"
        )
    return lambda piece, key: weigh(params, piece, key)


def whole_weights(weigh: Callable, micro: Batch, keys: Array) -> dict[str, Array]:
    """Weights of the terms, summed over the microbatches."""
    return jax.tree.map(jnp.sum, jax.lax.map(lambda xs: weigh(*xs), (micro, keys)))


def chosen(tree: Any, choice: Any) -> Any:
    """`tree` with None in place of the leaves that are not chosen."""
    return jax.tree.map(lambda leaf, keep: leaf if keep else None, tree, choice)


def joined(params: Any, frozen: Any) -> Any:
    """One tree from two that hold None where the other has a leaf."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda leaf: leaf is None
    )


def _laid_out(bound: BoundPlan, infos: Any, grads: Params) -> Params:
    if bound.single:
        return grads

    def lay(grad: Array, info: Any) -> Array:
        return jax.lax.with_sharding_constraint(grad, param_sharding(bound, "gradients", info))

    return jax.tree.map(lay, grads, infos)
