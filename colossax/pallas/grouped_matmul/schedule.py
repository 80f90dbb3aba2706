"""Which rows each tile of a grouped matmul reads, and which of them are its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Row tiles, group after group; those from `count` on are surplus.

    Every tile lies inside the rows there are: the first of a group may read rows of the group
    before, the last rows of the next, and the last of all starts early. `low` and `high` tell which
    rows of a tile are of its group and of no other tile.

    Attributes:
        group: `[v]`, index of the group; e for the rows behind the last one.
        first: `[v]`, first row read.
        low: `[v]`, first row of the tile that it owns.
        high: `[v]`, one past the last.
        count: `[1]`, tiles that own a row.
    """

    group: Any
    first: Any
    low: Any
    high: Any
    count: Any


def most_visits(rows: int, groups: int, tile: int, align: int = 1) -> int:
    """No group sizes that sum to at most `rows` need more tiles, the rows behind them included.

    With r_i in `[1, tile]` rows of the last tile of group i used and m_i rows of its first not its
    own, the sizes sum to `rows = tile sum_i (c_i - 1) + sum_i (r_i - m_i)` for c_i tiles each. The
    next group starts where this one ends, `m_(i+1) = r_i mod align`: the last sum is least with all
    r_i = 1, and is then the number of groups without alignment, and with it 1.
    """
    least = groups + 1 if align == 1 else 1
    return groups + 1 + (rows - least) // tile


def row_visits(group_sizes: Int[Array, " e"], rows: int, tile: int, *, align: int = 1) -> Visits:
    """Tiles of `tile` rows, each starting where its group or the tile before it leaves off.

    Args:
        group_sizes: They sum to `rows` or less; what exceeds it is cut off.
        rows: Of the matrix, at least `tile`.
        tile: Rows of a tile.
        align: Tiles start at multiples of it, the first of a group before the group if need be; it
            divides `rows` and `tile`.

    Cost: O(v log e) with v = `most_visits`; 16 v bytes.
    """
    assert rows % align == 0 and tile % align == 0, (rows, tile, align)
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    aligned = starts // align * align
    tiles = jnp.where(ends > starts, (ends - aligned + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(tiles)
    visit = jnp.arange(most_visits(rows, groups, tile, align), dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, visit, side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups)
    start = aligned[group] + (visit - (tile_ends - tiles)[group]) * tile
    first = jnp.clip(start, 0, rows - tile)
    low = jnp.clip(jnp.maximum(start, starts[group]) - first, 0, tile)
    high = jnp.clip(jnp.minimum(start + tile, ends[group]) - first, low, tile)
    return Visits(group, first, low, high, tile_ends[-1:])


def visits_of_groups(visits: Visits, groups: int) -> Int[Array, ""]:
    """How many come before those of the rows behind the last group, of which nothing is made."""
    return jnp.minimum(visits.count[0], jnp.searchsorted(visits.group, groups))
