"""Which device computes which expert, where busy experts have several replicas.

A table says of each device which experts it computes; experts at rest know nothing of it. Experts
go from where they rest to the devices that compute them, whole, and the gradients of an expert's
replicas are summed on the way back.
"""

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from colossax.errors import InputError, PlanError

Table = tuple[tuple[int, ...], ...]
"""Of each device of the group, in their order, the experts that it computes."""

Loads = Sequence[float | int] | np.ndarray
"""Of each expert."""


def replicas_of(loads: Loads, slots: int) -> np.ndarray:
    """How many replicas each expert has, of `slots` in all.

    Each has one; each further one goes to the expert whose replicas have the largest loads.
    """
    counts = np.ones(len(loads), int)
    busiest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(slots - len(loads)):
        _, expert = busiest[0]
        counts[expert] += 1
        heapq.heapreplace(busiest, (-loads[expert] / counts[expert], expert))
    return counts


def packed(loads: Loads, bins: int) -> list[list[int]]:
    """Items in bins of equally many, the heaviest first, each to the lightest bin with room."""
    room = len(loads) // bins
    found: list[list[int]] = [[] for _ in range(bins)]
    weights = np.zeros(bins)
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        chosen = min((b for b in range(bins) if len(found[b]) < room), key=lambda b: weights[b])
        found[chosen].append(item)
        weights[chosen] += loads[item]
    return found


def balanced_placement(
    loads: Loads, devices: int, slots: int, *, nodes: int = 1, groups: int = 1
) -> Table:
    """A table for `plan.experts.placement` that spreads the loads of a run evenly.

    Groups of experts go to nodes, then replicas to the busiest experts of each node, then replicas
    to devices: each step takes the heaviest first, to where least is, as many to each.

    Args:
        loads: Choices of each expert, such as `expert_load` of a run, summed over steps.
        devices: That the experts are split over, those of a node next to each other.
        slots: Experts that a device computes; in all as many as there are experts, or more.
        nodes: Of devices; experts of a group stay on one.
        groups: Of consecutive experts, as gates with groups have.

    Raises:
        InputError: Nodes do not divide groups or devices, groups do not divide experts, or there
            are fewer slots than experts.

    Source: the load balancer for expert parallelism that came with DeepSeek-V3.
    """
    experts = len(loads)
    if experts % groups or groups % nodes or devices % nodes:
        raise InputError(
            f"placement: {nodes} nodes must divide {groups} groups and {devices} devices, and"
            f" groups divide {experts} experts; give nodes 1 and groups 1, or numbers that do"
        )
    if devices * slots < experts:
        raise InputError(
            f"placement: {devices} devices of {slots} slots have fewer than {experts} experts; give"
            f" {-(-experts // devices)} slots or more"
        )
    each, here = experts // groups, devices // nodes
    loads = np.asarray(loads, float).tolist()
    of_group = np.asarray(loads).reshape(groups, each)
    table: list[tuple[int, ...]] = []
    for taken in packed(of_group.sum(axis=1).tolist(), nodes):
        own = [group * each + i for group in sorted(taken) for i in range(each)]
        counts = replicas_of([loads[expert] for expert in own], here * slots)
        copies = [expert for expert, count in zip(own, counts, strict=True) for _ in range(count)]
        shares = [loads[expert] / counts[own.index(expert)] for expert in copies]
        table += [tuple(sorted(copies[i] for i in row)) for row in packed(shares, here)]
    return tuple(table)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A table, and what follows from it.

    Attributes:
        table: See `Table`.
        experts: How many there are, each at rest on one device of the group, in their order.
    """

    table: Table
    experts: int

    @property
    def slots(self) -> int:
        """Of all devices: experts, and further replicas."""
        return len(self.table) * len(self.table[0])

    @functools.cached_property
    def replicas(self) -> tuple[np.ndarray, np.ndarray]:
        """`[e, r]`, of each expert the slots that compute it, and `[e]`, how many they are."""
        flat = np.concatenate(self.table)
        found = [np.flatnonzero(flat == expert) for expert in range(self.experts)]
        counts = np.array([len(each) for each in found])
        # A row goes on from its beginning; only the first `counts` are read.
        return np.stack([np.resize(each, counts.max()) for each in found]), counts

    @functools.cached_property
    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """What each device sends, and takes of what it gets.

        `[g, g m]`: numbers of a device's experts at rest, m for each device, one too large for
        none; `[g, l]`: for each slot of a device its place in what it gets, `[g m]`.
        """
        devices, rest = len(self.table), self.experts // len(self.table)
        wanted = [
            [sorted({e for e in row if e // rest == source}) for row in self.table]
            for source in range(devices)
        ]
        most = max(len(each) for row in wanted for each in row)
        sent = np.full((devices, devices, most), rest, np.int32)
        for source, row in enumerate(wanted):
            for device, each in enumerate(row):
                sent[source, device, : len(each)] = np.array(each, np.int32) - source * rest
        taken = [
            [e // rest * most + wanted[e // rest][device].index(e) for e in row]
            for device, row in enumerate(self.table)
        ]
        return sent.reshape(devices, -1), np.array(taken, np.int32)

    def slot_of(self, expert: Int[Array, "b s k"]) -> Int[Array, "b s k"]:
        """For each choice a slot that computes it: of several by the token's number, in turn."""
        slots, counts = self.replicas
        rows, length, _ = expert.shape
        token = jnp.arange(rows)[:, None, None] * length + jnp.arange(length)[:, None]
        some = (expert >= 0) & (expert < self.experts)
        known = jnp.where(some, expert, 0)
        slot = jnp.asarray(slots)[known, token % jnp.asarray(counts)[known]]
        return jnp.where(some, slot, self.slots).astype(expert.dtype)


def placement_of(table: Table | None, experts: int, group: Sequence[str], devices: int):
    """The plan's placement of so many experts; None where experts are computed where they rest.

    Raises:
        PlanError: The table is for other devices or experts.
    """
    if table is None:
        return None
    over = ",".join(group) or "nothing"
    if devices != len(table):
        raise PlanError(
            f"plan.experts.placement: has experts of {len(table)} devices, and they are split over"
            f" {devices} ({over}); give a row for each device of experts.group"
        )
    found = {expert for row in table for expert in row}
    if found != set(range(experts)):
        wrong = min(found.symmetric_difference(range(experts)))
        what = "is computed nowhere" if wrong < experts else f"is none of {experts}"
        raise PlanError(
            f"plan.experts.placement: expert {wrong} {what}; name each of 0 to {experts - 1} once"
            " or more"
        )
    return Placement(table, experts)


def placed_local(placement: Placement, group: Sequence[str], w: Array) -> Array:
    """A device's experts at rest `[e / g, ...]` as those that it computes, `[l, ...]`.

    Cost: by all-to-all the most experts that one device sends to another, times the devices: so
    many are held for a while. The transpose sums gradients of replicas.
    """
    me = jax.lax.axis_index(tuple(group))
    sent, taken = (jnp.asarray(each)[me] for each in placement.moves)
    w = w.at[sent].get(mode="fill", fill_value=0)
    w = jax.lax.all_to_all(w, tuple(group), split_axis=0, concat_axis=0, tiled=True)
    return w[taken]
