"""Parts of sequences: where keys are cut, which parts there are to do, and how they are merged."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST_PART = 512
"""Slots of a part: its output then is a few hundredths of what it reads."""

MOST_PARTS = 32
"""Of a sequence: the outputs of all are read when they are merged, done or not."""

ROUND = 64
"""Parts are whole tiles."""


def part_slots(length: int) -> int:
    """Slots of a part of sequences of up to `length` slots: by that alone, whoever is there."""
    return max(LEAST_PART, math.ceil(length / MOST_PARTS / ROUND) * ROUND)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that groups see, one after the other.

    Attributes:
        group: `[i]` int32, of each part; those from `count` on are surplus.
        number: `[i]` int32, which of its sequence.
        bounds: `[g, 4]` int32, see `Seen.bounds`.
        count: `[1]` int32.
        slots: Of a part.
        most: Parts of the longest sequence.
    """

    group: Any
    number: Any
    bounds: Any
    count: Any
    slots: int = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, bounds: Int[Array, "g 4"], length: int, slots: int) -> "Parts":
        """Of groups that see these slots of sequences of up to `length`.

        Cost: O(g i) for i = g most parts; a few integers each.
        """
        assert slots % ROUND == 0, slots
        groups, most = bounds.shape[0], math.ceil(length / slots)
        bounds = jnp.minimum(bounds, length)
        first, last = _parts_of(bounds, slots)
        ends = jnp.cumsum(last - first, dtype=jnp.int32)
        place = jnp.arange(groups * most, dtype=jnp.int32)
        group = jnp.sum(ends[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
        group = jnp.minimum(group, groups - 1)
        number = first[group] + place - (ends - (last - first))[group]
        return cls(
            group=group, number=number, bounds=bounds, count=ends[-1:], slots=slots, most=most
        )

    def merged(
        self, out: Float[Array, "g k most m hv"], lse: Float[Array, "g k most m"]
    ) -> tuple[Float[Array, "g k m hv"], Float[Array, "g k m"]]:
        """Attention to all parts from that to each; of parts not done memory is as it was."""
        first, last = _parts_of(self.bounds, self.slots)
        place = jnp.arange(self.most)
        done = (place >= first[:, None]) & (place < last[:, None])
        done = done[:, None, :, None]
        lse = jnp.where(done, lse, -jnp.inf)
        top = jnp.max(lse, axis=2)
        safe = jnp.where(jnp.isneginf(top), 0.0, top)
        weights = jnp.exp(lse - safe[:, :, None])
        total = jnp.sum(weights, axis=2)
        shares = weights / jnp.where(total == 0, 1.0, total)[:, :, None]
        summed = jnp.sum(jnp.where(done[..., None], out, 0.0) * shares[..., None], axis=2)
        return summed, jnp.where(total == 0, -jnp.inf, safe + jnp.log(total))


def _parts_of(bounds: Array, slots: int) -> tuple[Array, Array]:
    """The first part that a group sees, and one behind the last."""
    first = bounds[:, 0] // slots
    return first, jnp.maximum(first, -(-bounds[:, 3] // slots))
