"""What a layer of experts sends, by formulas; tests hold them to compiled programs."""

import dataclasses
import math
from collections.abc import Collection, Mapping

import jax.numpy as jnp

from colossax.sharding.experts.layout import Layout
from colossax.sharding.matmul.splits import Split, axes_of, check_nested

_NUMBER = 4
"""Bytes of a weight of a choice, and of a number of an expert or of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a device sends in rings, for one layer and microbatch.

    Attributes:
        tokens: Tokens, rows and what belongs to them, forward and backward, in one pass, or in as
            many as there are chunks.
        weights: The experts' matrices, gathered in both directions and, with a placement, sent to
            where they are computed; and their gradients, summed.
    """

    tokens: float
    weights: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.tokens + self.weights


def sent(
    layout: Layout, width: int, dtype: jnp.dtype, shapes: Mapping[str, tuple[int, ...]]
) -> Sent:
    """Of a layer, forward and backward, where all rows go in one pass, or once in chunks.

    With n devices in the group, f that split hidden features, and r bytes of a buffer of n `slots`
    rows: by all-to-all `5 (n - 1) / n r`, as backward sends the rows once more; over features
    `5 (f - 1) r`. Hierarchically, of n = a b devices, `5 ((a - 1) / a + (b - 1) / b) r`. Tokens of
    r bytes that are gathered from g devices: `5 (g - 1) / g r`, as gradients of outputs are
    gathered too, and sums of both directions are scattered.

    Args:
        layout: Of the layer.
        width: Of a token.
        dtype: In which tokens and matrices are sent.
        shapes: Of each array of all experts.
    """
    size = jnp.dtype(dtype).itemsize
    of_row = 5 * width * size + 3 * _NUMBER  # weights of choices go twice, their gradient once
    if layout.sends:
        rows = layout.destinations * layout.slots * (layout.chunks if layout.pipelined else 1)
        counts = 2 * _NUMBER * layout.destinations * layout.experts_here
        features = layout.size(layout.features)
        levels = (layout.group[:1], layout.group[1:]) if layout.hierarchical else (layout.group,)
        tokens = sum(_share(layout.size(axes)) for axes in levels) * (rows * of_row + counts)
        tokens += (features - 1) * (rows * of_row + counts)
    else:
        gathered = layout.size(layout.gathered)
        # Numbers of the chosen go in both directions; their weights too, and have a gradient.
        of_token = 5 * width * size + 5 * _NUMBER * layout.choices
        tokens = _share(gathered) * layout.here * of_token
        if layout.partial:
            back = 2 * width * size + _NUMBER * layout.choices
            tokens += 2 * _share(layout.size(layout.partial)) * layout.here // gathered * back
    if layout.sliced:
        back = 2 * width * size + _NUMBER * layout.choices
        apart = layout.size(layout.sliced)
        tokens += _share(apart) * layout.here * apart * back
    return Sent(
        tokens=tokens,
        weights=sum(_of_weights(layout, name, shape, size) for name, shape in shapes.items()),
    )


def _of_weights(layout: Layout, name: str, shape: tuple[int, ...], size: int) -> float:
    splits, wide = layout.weights[name], layout.summed.itemsize
    gathered = moved(layout, shape, splits.rest, splits.held) * size
    summed = moved(layout, shape, splits.held, splits.grad, partial=layout.gradient_axes) * wide
    return 2 * gathered + summed + _placed(layout, shape) * (2 * size + wide)


def _placed(layout: Layout, shape: tuple[int, ...]) -> float:
    """Numbers that `placed_local` sends of an array of this shape."""
    if layout.placement is None:
        return 0.0
    experts = layout.placement.moves[0].shape[1]
    devices = layout.size(layout.group)
    return _share(devices) * experts * math.prod(shape[1:]) / layout.size(layout.features)


def moved(
    layout: Layout,
    shape: tuple[int, ...],
    have: Split,
    want: Split,
    *,
    partial: Collection[str] = (),
) -> float:
    """Numbers that `move_local` sends of an array of this shape."""
    check_nested(have, want, name="array")
    block = math.prod(shape) / layout.size(axes_of(have))
    sent = 0.0
    for old, new in zip(have, want, strict=True):
        for axis in new[len(old) :]:
            if axis in partial:
                sent += _share(layout.size((axis,))) * block
            block /= layout.size((axis,))
    rest = tuple(axis for axis in partial if axis not in axes_of(want))
    sent += 2 * _share(layout.size(rest)) * block
    for old, new in zip(have, want, strict=True):
        more = layout.size(old[len(new) :])
        block *= more
        sent += _share(more) * block
    return sent


def buffer_rows(layout: Layout) -> int:
    """Rows that a device's experts are given in a pass, at most."""
    return layout.destinations * layout.slots * layout.size(layout.features if layout.sends else ())


def _share(devices: int) -> float:
    """Of what a ring of so many holds, what each sends."""
    return (devices - 1) / devices
