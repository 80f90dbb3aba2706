"""Matrices of a checkpoint brought into codes, one of a layer at a time."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import ArraySlot, Checkpointer, RecordReader, slot_of
from colossax.config import BoundPlan
from colossax.errors import CheckpointError
from colossax.models.parameters import CODES
from colossax.nn.quantised.codes import Packing, dequantise, quantised
from colossax.nn.quantised.forms import KEPT
from colossax.offload import new_stack, store
from colossax.sharding import param_sharding
from colossax.typing import ParamInfo

Columns = Mapping[str, np.ndarray]
"""By path of a matrix, numbers of inputs of each of its layers, `[layers, count]`."""


def read_with_codes(
    reader: RecordReader,
    prefix: str,
    infos: Sequence[ParamInfo],
    wants: Sequence[tuple[ArraySlot, Any]],
    bound: BoundPlan,
    columns: Columns | None = None,
    *,
    exact: bool,
) -> list[jax.Array]:
    """Parameters of a checkpoint, codes made of the matrices that it holds in floats.

    Codes that it has itself, `kept`, are read as they are.

    Args:
        reader: The checkpoint.
        prefix: Of the records of its parameters.
        infos: What each is.
        wants: Record and layout of each; those of codes are not looked at.
        bound: The plan.
        columns: Which inputs are kept as they are, where some are.
        exact: Whether the checkpoint may hold no others.

    Raises:
        CheckpointError: Records are missing, of another model, or damaged; or there are others.
    """
    coded = [at for at, info in enumerate(infos) if info.quantised is not None]
    kept = [at for at in coded if infos[at].quantised.of.form == KEPT]
    packed = [at for at in coded if at not in kept]
    plain = [at for at, info in enumerate(infos) if info.quantised is None]
    slots = [wants[at][0] for at in plain]
    slots += [matrix_slot(reader, prefix, infos[at]) for at in coded]
    checkpointer = Checkpointer(reader.directory)
    checkpointer.check(reader.step, slots, exact=exact)
    own = [wants[at] for at in plain]
    arrays = checkpointer.restore(reader.step, own, convert=True, exact=False)
    found = dict(zip(plain, arrays, strict=True))
    own = [(_kept_slot(prefix, infos[at]), wants[at][1]) for at in kept]
    found.update(zip(kept, checkpointer.restore(reader.step, own, exact=False), strict=True))
    codes = read_quantised(reader, prefix, [infos[at] for at in packed], bound, columns)
    found.update(zip(packed, codes, strict=True))
    return [found[at] for at in range(len(infos))]


def read_quantised(
    reader: RecordReader,
    prefix: str,
    infos: Sequence[ParamInfo],
    bound: BoundPlan,
    columns: Columns | None = None,
) -> list[jax.Array]:
    """Codes and scales, laid out by the plan, of matrices that a checkpoint holds in floats.

    Args:
        reader: The checkpoint.
        prefix: Of the records of its parameters.
        infos: Of parts of matrices; of each matrix all its parts.
        bound: The plan.
        columns: Which inputs are kept as they are, where some are.

    Raises:
        CheckpointError: A matrix is not there, is another one, or is damaged.

    Cost: of floats the matrix of one layer is held, in its own dtype, each device its shard; of
    stacks in host memory the codes of one layer are on the devices.
    """
    found: dict[int, jax.Array] = {}
    matrices: dict[Any, dict[str, int]] = {}
    for at, info in enumerate(infos):
        of = matrices.setdefault((info.stood_at, info.first_layer), {})
        of[info.quantised.name] = at
    checkpointer = Checkpointer(reader.directory)
    for places in matrices.values():
        first = infos[next(iter(places.values()))]
        for row in range(max(1, first.layer_count)):
            matrix = _matrix(first, row)
            slot = matrix_slot(reader, prefix, first, row)
            where = param_sharding(bound, "params", matrix)
            (w,) = checkpointer.restore(reader.step, [(slot, where)], exact=False)
            kept = _columns_of(first, row, columns)
            for name, part in quantised(first.quantised.of, w, kept).items():
                at = places[name]
                if infos[at].quantised.as_the_matrix:
                    part = part.astype(bound.plan.precision.params)
                found[at] = _placed(found.get(at), part, row, infos[at], bound)
            del w  # before the next one is read
        for at in places.values():
            found[at] = jax.device_put(found[at], param_sharding(bound, "params", infos[at]))
    return [found[at] for at in range(len(infos))]


def _columns_of(info: ParamInfo, row: int, columns: Columns | None) -> jax.Array | None:
    """Of the matrix of one layer."""
    if not info.quantised.of.outliers:
        return None
    assert columns is not None and info.stood_at is not None
    return jnp.asarray(columns[info.stood_at][(info.first_layer or 0) + row])


def _kept_slot(prefix: str, info: ParamInfo) -> ArraySlot:
    """The record of a part of a matrix that was imported in codes."""
    at = dataclasses.replace(info, path=f"{info.stood_at}/{info.quantised.name}")
    return slot_of(at, f"{prefix.partition('/')[0]}/{CODES}")


def matrix_slot(reader: RecordReader, prefix: str, info: ParamInfo, row: int = 0) -> ArraySlot:
    """The record, and its layer, of the matrix that a parameter is a part of.

    Args:
        reader: The checkpoint.
        prefix: Of the records of its parameters.
        info: Of the part.
        row: Of its layers.

    Raises:
        CheckpointError: There is none.
    """
    slot = slot_of(_matrix(info, row), prefix)
    held = reader.records().get(slot.name)
    if held is None:
        raise CheckpointError(
            f"checkpoint step {reader.step} of '{reader.directory}' has no '{slot.name}', which"
            " the model's base is quantised from; give a checkpoint of that model"
        )
    return dataclasses.replace(slot, dtype=held[1])


def through_codes(packing: Packing, w: np.ndarray) -> np.ndarray:
    """What the codes of a matrix stand for, in its own dtype."""
    parts = quantised(packing, jnp.asarray(w))
    return np.asarray(dequantise(packing, parts, jnp.dtype("float32"))).astype(w.dtype)


def _matrix(info: ParamInfo, row: int) -> ParamInfo:
    """The matrix of one layer, on the device."""
    packing: Packing = info.quantised.of
    assert info.stood_at is not None
    return dataclasses.replace(
        info.on_device(),
        path=info.stood_at,
        dims=packing.dims,
        shape=packing.shape,
        first_layer=None if info.first_layer is None else info.first_layer + row,
        quantised=None,
    )


def _placed(
    stack: jax.Array | None, part: jax.Array, row: int, info: ParamInfo, bound: BoundPlan
) -> jax.Array:
    """The stack with a layer's part in it, which takes its place; without a stack the part."""
    if not info.stacked:
        return part
    where = param_sharding(bound, "params", info)
    if not info.on_host or tuple(where.spec)[:1] not in ((), (None,)):
        where = param_sharding(bound, "params", info.on_device())
    host = where.memory_kind == "pinned_host"
    if stack is None:
        of: Any = part.sharding
        row_of = jax.typeof(part)
        make = functools.partial(new_stack, info.shape[0], row_of, host=host, sharding=of)
        stack = jax.jit(make, out_shardings=where)()
    return _filler(where)(stack, part, row)


@functools.cache
def _filler(where: jax.sharding.Sharding) -> Any:
    return jax.jit(store, donate_argnums=0, out_shardings=where)
