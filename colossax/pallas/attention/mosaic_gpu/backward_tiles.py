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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shapes:
    """What fits the registers and shared memory at one pair of head sizes.

    Attributes:
        keys: Of a tile of blocks of queries.
        laden_keys: Likewise where a soft cap or a bias needs registers of its own.
        queries: Of a tile of blocks of keys.
        biased_queries: Likewise where there is a bias.
        apart: See `KeyTiles`.
        bias_keys: Of a tile of the bias.
        bias_warpgroups: See `BiasTiles`.
    """

    keys: int
    laden_keys: int
    queries: int
    biased_queries: int
    apart: bool = False
    bias_keys: int = 64
    bias_warpgroups: int = 2


_SHAPES = {
    (64, 64): _Shapes(keys=128, laden_keys=128, queries=128, biased_queries=64),
    (96, 96): _Shapes(keys=128, laden_keys=64, queries=64, biased_queries=64),
    (128, 128): _Shapes(keys=128, laden_keys=64, queries=64, biased_queries=32),
    (192, 128): _Shapes(
        keys=64, laden_keys=64, queries=64, biased_queries=32, apart=True, bias_warpgroups=1
    ),
    (192, 192): _Shapes(
        keys=64, laden_keys=32, queries=64, biased_queries=32, apart=True, bias_warpgroups=1
    ),
    (256, 256): _Shapes(
        keys=32,
        laden_keys=32,
        queries=32,
        biased_queries=32,
        apart=True,
        bias_keys=32,
        bias_warpgroups=1,
    ),
}
"""By head sizes of keys and values; tests/aot/test_attention_backward_kernels.py compiles each."""

HEAD_SIZES = tuple(_SHAPES)
"""Pairs of head sizes, of keys and of values, that there are tiles for."""


def tiles_for(h: int, hv: int, *, biased: bool, soft_cap: bool) -> BackwardTiles:
    """Tile shapes that the assembler takes without a spill.

    Raises:
        ValueError: There are none for these head sizes.
    """
    shapes = _SHAPES.get((h, hv))
    if shapes is None:
        raise ValueError(
            f"attention's backward kernels have no tiles for head sizes {h} of keys and {hv} of"
            f" values; they have {', '.join(f'{a}/{b}' for a, b in HEAD_SIZES)}"
        )
    return BackwardTiles(
        of_queries=QueryTiles(keys=shapes.laden_keys if biased or soft_cap else shapes.keys),
        of_keys=KeyTiles(
            queries=shapes.biased_queries if biased else shapes.queries, apart=shapes.apart
        ),
        of_bias=BiasTiles(keys=shapes.bias_keys, warpgroups=shapes.bias_warpgroups),
    )
