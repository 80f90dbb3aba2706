"""Which rows each tile of a grouped matmul reads, and which of them are its own."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Row tiles, group after group; those from `count` on are surplus.

    Every tile lies inside the rows there are: the last of a group may read rows of the next, and
    the last of all starts early. `low` and `high` tell which rows of a tile are of its group and
    of no other tile.

    Attributes:
        group: Index of the group; e for the rows behind the last one.
        first: First row read.
        low: First row of the tile that it owns.
        high: One past the last.
        count: Tiles that own a row.
    """

    group: Int[Array, " v"]
    first: Int[Array, " v"]
    low: Int[Array, " v"]
    high: Int[Array, " v"]
    count: Int[Array, " 1"]


def most_visits(rows: int, groups: int, tile: int) -> int:
    """No group sizes that sum to at most `rows` need more tiles, the rows behind them included.

    `ceil(s / tile) <= (s + tile - 1) / tile` summed over `groups + 1`.
    """
    return (rows + (groups + 1) * (tile - 1)) // tile


def row_visits(group_sizes: Int[Array, " e"], rows: int, tile: int) -> Visits:
    """Tiles of `tile` rows, each starting where its group or the tile before it leaves off.

    Args:
        group_sizes: They sum to `rows` or less; what exceeds it is cut off.
        rows: Of the matrix, at least `tile`.
        tile: Rows of a tile.

    Cost: O(v log e) with v = `most_visits`; 16 v bytes.
    """
    groups = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    tiles = (ends - starts + tile - 1) // tile
    tile_ends = jnp.cumsum(tiles)
    visit = jnp.arange(most_visits(rows, groups, tile), dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, visit, side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups)
    own = starts[group] + (visit - (tile_ends - tiles)[group]) * tile
    own_end = jnp.minimum(own + tile, ends[group])
    first = jnp.clip(own, 0, rows - tile)
    low = jnp.clip(own - first, 0, tile)
    high = jnp.clip(own_end - first, low, tile)
    return Visits(group, first, low, high, tile_ends[-1:])
