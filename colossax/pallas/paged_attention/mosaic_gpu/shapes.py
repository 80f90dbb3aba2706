"""Tiles of the kernel by head size."""

import dataclasses

COLUMNS = 64
"""Of an output that are stored at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a worker reads at a time.

    Attributes:
        keys: Slots of a tile.
        stages: Tiles in shared memory at once.
        workers: Pairs of warpgroups in a block, one that copies and one that computes. Of two each
            has half of the registers, which is too little for an output of 256 columns.
    """

    keys: int
    stages: int
    workers: int = 2


# Each assembles without spills and takes at most 227 KiB: tests/aot/test_paged_kernels.py.
_TILES = {
    64: Tile(keys=64, stages=4),
    128: Tile(keys=64, stages=2),
    256: Tile(keys=64, stages=2, workers=1),
}


def tile_for(head_dim: int) -> Tile:
    """The tile for heads of this size."""
    return _TILES[head_dim]
