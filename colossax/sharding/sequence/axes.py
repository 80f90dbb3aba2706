"""The mesh axes of a ring, and what travels along them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingAxes:
    """The one or two mesh axes of a ring; rank = outer index * inner_size + inner index.

    Attributes:
        inner: Axis of the ring, or of its fast links.
        inner_size: Devices along it; 1 is no ring.
        outer: Axis of the slow links of a double ring.
        outer_size: Devices along it.
    """

    inner: str
    inner_size: int
    outer: str | None = None
    outer_size: int = 1

    def __post_init__(self):
        if self.outer is None and self.outer_size != 1:
            raise ValueError(
                f"ring axes: outer_size is {self.outer_size} without an outer axis; name the axis"
            )

    @property
    def size(self) -> int:
        """Ranks of the whole ring."""
        return self.outer_size * self.inner_size

    @property
    def inner_circle(self) -> "Circle":
        """Ranks with the same outer index."""
        return Circle((self.inner,), self.inner_size)

    @property
    def outer_circle(self) -> "Circle":
        """Ranks with the same inner index."""
        return Circle(() if self.outer is None else (self.outer,), self.outer_size)

    @property
    def circle(self) -> "Circle":
        """All ranks."""
        return Circle(self.outer_circle.names + self.inner_circle.names, self.size)

    def source_local(
        self, outer_offset: int | Array = 0, inner_offset: int | Array = 0
    ) -> Int[Array, ""]:
        """Rank that lies this many places back along the two rings; without offsets one's own."""
        rank = (jax.lax.axis_index(self.inner) - inner_offset) % self.inner_size
        if self.outer is None:
            return rank
        outer = (jax.lax.axis_index(self.outer) - outer_offset) % self.outer_size
        return outer * self.inner_size + rank


class Circle(NamedTuple):
    """Devices that send to each other in turn: the axes along which they lie, and their number."""

    names: tuple[str, ...]
    size: int

    def shift_local(self, tree: Any, places: int) -> Any:
        """Every array sent `places` devices forward.

        Cost: sends all bytes of the tree once, one permute per array.
        """
        around = [(i, (i + places) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.names, around), tree)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How arrays are stacked with others of their shape and dtype, to travel as one message.

    Of two permutes side by side XLA hides one behind compute, so keys and values go together.
    """

    structure: Any
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: Any) -> "Packing":
        """For trees of this structure whose arrays agree where those of `tree` do."""
        leaves, structure = jax.tree.flatten(tree)
        kinds = [(x.shape, x.dtype) for x in leaves]
        groups = {kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in kinds}
        return cls(structure, tuple(groups.values()))

    def pack(self, tree: Any) -> tuple[Array, ...]:
        """The stacks; an array alone in its kind stays as it is."""
        leaves = jax.tree.leaves(tree)
        stacks = ([leaves[i] for i in group] for group in self.groups)
        return tuple(jnp.stack(stack) if len(stack) > 1 else stack[0] for stack in stacks)

    def unpack(self, packed: tuple[Array, ...]) -> Any:
        """Undoes `pack`."""
        leaves: dict[int, Array] = {}
        for group, stack in zip(self.groups, packed, strict=True):
            leaves.update(zip(group, stack if len(group) > 1 else (stack,), strict=True))
        return jax.tree.unflatten(self.structure, [leaves[i] for i in sorted(leaves)])
