"""Which row of a buffer belongs to which choice of which token, and how rows get there and back.

A token's k choices are sorted by expert, which is by device, as devices hold consecutive experts.
A buffer has so many slots for each device; pass p takes of what each device is to get the part
`[p slots, (p + 1) slots)`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sorted:
    """The choices of all tokens here, by expert.

    Attributes:
        order: `[t k]`, numbers of choices, those without an expert last.
        rank: `[t, k]`, where each choice stands in it.
        expert: `[t, k]`, numbers of experts; one too large for none.
        ends: `[e + 1]`, where each expert's choices begin, and the last one's end.
    """

    order: Any
    rank: Any
    expert: Any
    ends: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """One pass: the slots of its buffer, device after device.

    Attributes:
        choice: `[g slots]`, number of the choice that a slot holds; t k for none.
        of_choice: `[t, k]`, the slot that holds a choice; g slots for none.
    """

    choice: Any
    of_choice: Any


def sort_choices(expert: Int[Array, "t k"], experts: int) -> Sorted:
    """Choices by expert, stable, so that earlier tokens come first.

    Args:
        expert: 0 to `experts` - 1; any other number is none.
        experts: How many.
    """
    expert = jnp.where((expert >= 0) & (expert < experts), expert, experts).astype(jnp.int32)
    flat = expert.ravel()
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.arange(flat.size, dtype=jnp.int32)
    rank = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    counts = jnp.zeros((experts + 1,), jnp.int32).at[flat].add(1)
    ends = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts[:experts])])
    return Sorted(
        order=order, rank=rank.reshape(expert.shape), expert=expert, ends=ends.astype(jnp.int32)
    )


def rows_per_device(found: Sorted, devices: int) -> Int[Array, " g"]:
    """Rows that each device is to get in all."""
    each = (found.ends.shape[0] - 1) // devices
    return jnp.diff(found.ends[::each])


def slots_of(found: Sorted, devices: int, slots: int, number: Array | int) -> Slots:
    """The buffer of pass `number`, with so many slots for each device."""
    experts = found.ends.shape[0] - 1
    each = experts // devices
    starts = found.ends[:-1:each]
    first = starts + number * slots
    place = first[:, None] + jnp.arange(slots, dtype=jnp.int32)
    held = place < found.ends[each::each][:, None]
    total = found.order.shape[0]
    picked = found.order.at[place.ravel()].get(mode="fill", fill_value=total)
    device = jnp.minimum(found.expert // each, devices - 1)
    offset = found.rank - first[device]
    here = (offset >= 0) & (offset < slots) & (found.expert < experts)
    return Slots(
        choice=jnp.where(held.ravel(), picked, total),
        of_choice=jnp.where(here, device * slots + offset, devices * slots),
    )


def spread(x: Float[Array, "t d"], taken: Slots) -> Float[Array, "slots d"]:
    """The token of each slot; zeros where there is none.

    Its transpose is `collect`: neither adds rows up one by one.
    """
    token = taken.choice // taken.of_choice.shape[1]
    return x.at[token].get(mode="fill", fill_value=0)


def collect(rows: Float[Array, "slots d"], taken: Slots) -> Float[Array, "t d"]:
    """Of each token the sum of the rows of its choices that this pass has, in float32."""
    # One choice after another: the sum over k of a gather of [t, k] rows may be made whole.
    total = jnp.zeros((taken.of_choice.shape[0], rows.shape[1]), jnp.float32)
    for choice in range(taken.of_choice.shape[1]):
        found = rows.at[taken.of_choice[:, choice]].get(mode="fill", fill_value=0)
        total = total + found.astype(jnp.float32)
    return total


def spread_choices(weight: Float[Array, "t k"], taken: Slots) -> Float[Array, " slots"]:
    """The weight of each slot's choice; zero where there is none."""
    return weight.ravel().at[taken.choice].get(mode="fill", fill_value=0)


def collect_choices(slots: Float[Array, " slots"], taken: Slots) -> Float[Array, "t k"]:
    """Of each choice what its slot has; zero where this pass has none. Transposes the former."""
    return slots.at[taken.of_choice].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByExpert:
    """Rows of several sources, each by expert, put in the order of the experts.

    Attributes:
        source: `[rows]`, which row comes at each place; one too large behind the last.
        place: `[rows]`, where each row goes; one too large for rows that are none.
        sizes: `[l]`, rows of each expert.
    """

    source: Any
    place: Any
    sizes: Any


def by_expert(counts: Int[Array, "g l"], slots: int) -> ByExpert:
    """The order, from how many rows of each expert each source's slots begin with.

    Cost: two binary searches for each row.
    """
    sources, each = counts.shape
    rows = sources * slots
    ends = jnp.cumsum(counts, axis=1)
    starts = ends - counts
    blocks = counts.T.ravel()  # expert by expert, of each the sources in turn
    block_ends = jnp.cumsum(blocks)
    block_starts = block_ends - blocks
    place = jnp.arange(rows, dtype=jnp.int32)
    block = jnp.searchsorted(block_ends, place, side="right").astype(jnp.int32)
    inside = jnp.minimum(block, blocks.shape[0] - 1)
    expert, source = inside // sources, inside % sources
    row = source * slots + starts[source, expert] + place - block_starts[inside]
    slot = jnp.arange(slots, dtype=jnp.int32)
    of_slot = jax.vmap(lambda found: jnp.searchsorted(found, slot, side="right"))(ends)
    kept = jnp.minimum(of_slot, each - 1).astype(jnp.int32)
    at = jnp.arange(sources, dtype=jnp.int32)[:, None]
    goes = block_starts[kept * sources + at] + slot - starts[at, kept]
    return ByExpert(
        source=jnp.where(block < blocks.shape[0], row, rows),
        place=jnp.where(of_slot < each, goes, rows).ravel(),
        sizes=jnp.sum(counts, axis=0).astype(jnp.int32),
    )


@jax.custom_vjp
def permuted(rows: Float[Array, "rows *d"], source: Array, place: Array) -> Float[Array, "rows *d"]:
    """`rows[source]`, zeros for numbers that are none; `place` is the inverse."""
    return rows.at[source].get(mode="fill", fill_value=0)


permuted.defvjp(
    lambda rows, source, place: (permuted(rows, source, place), (source, place)),
    lambda saved, dy: (permuted(dy, saved[1], saved[0]), None, None),
)
