"""Products of packed weights by a kernel: each device multiplies the part of one that it holds.

No compiler knows how to split a kernel, so this is a region manual over the whole mesh.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from colossax.config import BoundPlan
from colossax.sharding.context import current
from colossax.sharding.matmul.splits import Axes, Split, axes_of, split_of
from colossax.sharding.rules import batch_axes, resolve, seq_axes
from colossax.typing import Dims

Multiply = Callable[[Array, Mapping[str, Array]], Array]
"""`(x [m, k], parts) -> [m, *outs]` of one device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where a packed weight lies while it is multiplied.

    Attributes:
        bound: Plan and mesh; None: all of it is on one device.
        part: Of every array that is kept of it, mesh axes by dim.
        inputs_at: Which of these dims is of the input.
        outputs: How dims of the output are split.
    """

    bound: BoundPlan | None
    part: Split = ()
    inputs_at: int = 0
    outputs: Split = ()

    @property
    def inputs(self) -> Axes:
        """Axes that split the input; products are partial over them."""
        return () if self.bound is None else self.part[self.inputs_at]

    def shares(self) -> tuple[int, int]:
        """Among how many devices inputs and outputs are split."""
        if self.bound is None:
            return 1, 1
        return self.bound.size(self.inputs), self.bound.size(axes_of(self.outputs))

    def product(
        self, multiply: Multiply, x: Float[Array, "m k"], parts: Mapping[str, Array]
    ) -> Float[Array, "m *outs"]:
        """`x` times the weight.

        Args:
            multiply: What a device does with its part.
            x: Rows, which all devices have.
            parts: What is kept of the weight, by name.

        Cost: no communication where outputs are split; of split inputs one sum of `m n` items over
        their devices, in the dtype of `x`.
        """
        if self.bound is None:
            return multiply(x, parts)

        def product_local(x: Array, parts: Mapping[str, Array]) -> Array:
            y = multiply(x, parts)
            return jax.lax.psum(y, self.inputs) if self.inputs else y

        part: Any = PartitionSpec(*(axes or None for axes in self.part))
        return jax.shard_map(
            product_local,
            mesh=self.bound.mesh,
            in_specs=(PartitionSpec(None, self.inputs or None), dict.fromkeys(parts, part)),
            out_specs=PartitionSpec(None, *(axes or None for axes in self.outputs)),
            check_vma=False,
        )(x, dict(parts))


def packed_layout(
    shapes: Mapping[str, tuple[int, ...]], dims: Dims, *, inputs_at: int, outputs: int
) -> PackedLayout | None:
    """How the plan in force lays out a packed weight that is multiplied.

    Args:
        shapes: Of all that is kept of it, by name.
        dims: Logical dims of each.
        inputs_at: Which of them is of the input, 0 or -1.
        outputs: How many are of the output, beside it.

    Returns:
        None where devices split the tokens, or the parts of one weight differently.

    Raises:
        PlanError: A size is not a multiple of the devices of its axes.
    """
    bound = current()
    if bound is None or bound.single:
        return PackedLayout(bound=None)
    if batch_axes(bound) or seq_axes(bound):
        return None
    named = f"weight {dims}"
    found = {split_of(resolve(bound, "weights", dims, x, name=named)) for x in shapes.values()}
    if len(found) > 1:
        return None
    (part,) = found
    beside = part[1 : 1 + outputs] if inputs_at == 0 else part[-1 - outputs : -1]
    return PackedLayout(bound=bound, part=part, inputs_at=inputs_at, outputs=beside)
