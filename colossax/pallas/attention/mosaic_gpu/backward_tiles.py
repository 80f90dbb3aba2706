"""Tile shapes of the backward kernels: those that the assembler takes without spilling."""

import dataclasses
import math

from colossax.pallas.mosaic import WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTiles:
    """Blocks of queries that loop over tiles of keys.

    Attributes:
        warpgroups: That compute, with 64 queries each.
        keys: Of a tile.
        stages: Tiles of k, and of the bias, in shared memory.
        v_stages: Tiles of v.
    """

    warpgroups: int = 2
    keys: int
    stages: int = 2
    v_stages: int = 2

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warpgroups * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyTiles:
    """Blocks of keys that loop over tiles of queries.

    Attributes:
        apart: Whether dk and dv are made by different warpgroups, both from the same 64 keys,
            where one has not the registers for both; else each makes both, from 64 of its own.
        queries: Of a tile.
        stages: Tiles in shared memory.
    """

    apart: bool = False
    queries: int
    stages: int = 2
    warpgroups: int = 2

    @property
    def keys(self) -> int:
        """Of a block."""
        return WARPGROUP_ROWS if self.apart else self.warpgroups * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasTiles:
    """Blocks of one tile of the bias each, that loop over what shares it.

    Attributes:
        warpgroups: That compute, with 64 queries each.
        keys: Of a tile.
        stages: Tiles of q, dout, k and v in shared memory.
    """

    warpgroups: int = 2
    keys: int
    stages: int = 2

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """Of the kernels of one backward pass."""

    of_queries: QueryTiles
    of_keys: KeyTiles
    of_bias: BiasTiles

    @property
    def s_multiple(self) -> int:
        """What the number of queries is filled up to."""
        return math.lcm(self.of_queries.rows, self.of_keys.queries, self.of_bias.rows)

    @property
    def t_multiple(self) -> int:
        """What the number of keys is filled up to."""
        return math.lcm(self.of_queries.keys, self.of_keys.keys, self.of_bias.keys)


def tiles_for(h: int, hv: int, bias_bytes: int, soft_cap: bool) -> BackwardTiles:
    return BackwardTiles(
        of_queries=QueryTiles(keys=64), of_keys=KeyTiles(queries=64), of_bias=BiasTiles(keys=64)
    )
