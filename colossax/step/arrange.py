"""A global batch with its tokens in the order that a plan wants them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.errors import InputError
from colossax.sharding import NATURAL, RowOrder
from colossax.typing import SOURCE, SOURCE_SEGMENTS, Batch, Dims

_SEGMENTS = {"tokens": "segments", SOURCE: SOURCE_SEGMENTS}
"""Of each text the array that marks its padding."""


@jax.tree_util.register_pytree_with_keys_class
class Arranged(dict):
    """A batch whose rows lie in `order`; it says so wherever it goes, through `jax.jit` too."""

    def __init__(self, arrays: Mapping[str, Any], order: RowOrder):
        super().__init__(arrays)
        self.order = order

    def tree_flatten_with_keys(self):
        names = tuple(sorted(self))
        children = [(jax.tree_util.DictKey(name), self[name]) for name in names]
        return children, (names, self.order)

    @classmethod
    def tree_unflatten(cls, aux, children):
        names, order = aux
        return cls(dict(zip(names, children, strict=True)), order)


def check_segments(batch: Batch) -> None:
    """Refuse host arrays whose documents are not in one piece and numbered in their order.

    Kernels need it: what a token sees is then one range.

    Cost: a few passes over an array of small integers.

    Raises:
        InputError: A segment stands behind a greater one of its row, or has padding inside.
    """
    segments = batch.get("segments")
    if not isinstance(segments, np.ndarray) or segments.ndim == 0 or 0 in segments.shape:
        return
    highest = np.maximum.accumulate(segments, axis=-1)
    wrong = (segments >= 0) & (segments < highest)
    if wrong.any():
        *row, place = np.argwhere(wrong)[0].tolist()
        segment, before = segments[(*row, place)], highest[(*row, place)]
        raise InputError(
            f"batch 'segments': row {row} has segment {segment} behind segment {before}, at token"
            f" {place}; number the documents of a row in their order, and mark padding by -1"
        )
    real = segments[..., 1:] >= 0
    parted = real & (segments[..., :-1] < 0) & (segments[..., 1:] == highest[..., :-1])
    if parted.any():
        *row, place = np.argwhere(parted)[0].tolist()
        raise InputError(
            f"batch 'segments': row {row} has padding inside segment {segments[(*row, place + 1)]},"
            f" before token {place + 1}; put padding before, between or behind documents"
        )


OrderOf = Callable[[int], RowOrder]


def row_length(batch: Batch, dims: Mapping[str, Dims]) -> int | None:
    """Tokens of a row; None where no array has a dim `seq`, or they differ in its size."""
    lengths = {batch[name].shape[at] for name in batch if (at := _seq_dim(dims[name])) is not None}
    return lengths.pop() if len(lengths) == 1 else None


def arranged(batch: Batch, dims: Mapping[str, Dims], order: RowOrder) -> Arranged:
    """The arrays with their dim `seq` in this order, filled up at its natural end.

    Padding is marked by segment -1, whose array is added to text that has none.

    Args:
        batch: Host or device arrays, tokens in natural order.
        dims: Logical dims of each.
        order: Of the result.

    Raises:
        InputError: Rows must be filled up and the batch has no way to say where.
    """
    if order.padding and not {"segments", "tokens"} & batch.keys():
        raise InputError(
            f"batch: rows need {order.padding} more tokens for this plan's mesh, and there are"
            f" no 'segments' to mark them by; pad the rows, or add segments (-1 is padding)"
        )
    if order.padding:
        batch, dims = _marked(batch, dims, _SEGMENTS)
    return Arranged({n: _arranged(n, x, dims[n], order) for n, x in batch.items()}, order)


def in_natural_order(batch: Batch, dims: Mapping[str, Dims], order: RowOrder) -> dict[str, Any]:
    """What `arranged` did, undone: tokens as they stand in a row, without its padding."""

    def natural(x: Any, at: int | None) -> Any:
        if at is None or order == NATURAL:
            return x
        places = np.argsort(order.indices(x.shape[at]))
        return jnp.take(x, places[: len(places) - order.padding], axis=at)

    return {name: natural(x, _seq_dim(dims[name])) for name, x in batch.items()}


def filled_up(batch: Batch, dims: Mapping[str, Dims], order_of: OrderOf) -> Batch:
    """Rows of texts of several lengths, each filled up at its end, in their own order.

    Args:
        batch: Host or device arrays: what is read is `source`, what is written `tokens`.
        dims: Logical dims of each.
        order_of: Order that the plan wants of rows of a length; its padding counts.

    Raises:
        InputError: Rows must be filled up and the batch has no way to say where.
    """

    def padding(name: str) -> int:
        at = _seq_dim(dims[name])
        return 0 if at is None else order_of(batch[name].shape[at]).padding

    padded = [name for name in batch if padding(name)]
    if padded and "tokens" not in batch:
        raise InputError(
            f"batch '{padded[0]}': rows of several lengths need more tokens for this plan's mesh,"
            " and there are no 'tokens' beside 'source' to mark them in; pad the rows"
        )
    batch, dims = _marked(batch, dims, [text for text in _SEGMENTS if text in padded])
    return {
        name: _arranged(name, x, dims[name], RowOrder(padding=padding(name)))
        for name, x in batch.items()
    }


def _marked(
    batch: Batch, dims: Mapping[str, Dims], texts: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Dims]]:
    """With segments, all 0, of those texts that are there and have none."""
    batch, dims = dict(batch), dict(dims)
    for text in texts:
        segments = _SEGMENTS[text]
        if text in batch and segments not in batch:
            library = jnp if isinstance(batch[text], jax.Array) else np
            batch[segments] = library.zeros(batch[text].shape, np.int32)
            dims[segments] = dims[text]
    return batch, dims


def _arranged(name: str, x: Any, dims: Dims, order: RowOrder) -> Any:
    at = _seq_dim(dims)
    if at is None or order == NATURAL:
        return x
    library = jnp if isinstance(x, jax.Array) else np
    if order.padding:
        widths = [(0, order.padding if i == at else 0) for i in range(x.ndim)]
        x = library.pad(x, widths, constant_values=_fill(name))
    return library.take(x, order.indices(x.shape[at]), axis=at)


def _fill(name: str) -> int:
    """What padding holds: numbers of documents mark it, other arrays are 0."""
    return -1 if name.endswith("segments") else 0


def _seq_dim(dims: Dims) -> int | None:
    return next((i for i, dim in enumerate(dims) if dim and dim.split(":")[0] == "seq"), None)
