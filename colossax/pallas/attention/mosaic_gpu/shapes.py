"""Tiles of the attention kernels: which head sizes there are, and how much a block holds."""

import dataclasses
from typing import Any

from colossax.pallas.mosaic import WARPGROUP_ROWS

WARPGROUPS = 2
"""That compute; one more moves memory."""

BLOCK_ROWS = WARPGROUPS * WARPGROUP_ROWS
"""Queries of one block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a block of queries reads at a time.

    Attributes:
        keys: Keys of a tile.
        stages: Tiles of keys and values in shared memory at once, at least two.
        bias_stages: Tiles of the bias at once.
    """

    keys: int
    stages: int = 2
    bias_stages: int = 2


# By the head sizes of keys and values. Each assembles without spills, and takes at most 227 KiB:
# tests/aot/test_attention_kernels.py.
_PLAIN = {
    (64, 64): Tile(keys=128, stages=4),
    (96, 96): Tile(keys=128, stages=3),
    (128, 128): Tile(keys=128, stages=2),
    (192, 128): Tile(keys=128, stages=2),
    (192, 192): Tile(keys=64, stages=3),
    (256, 256): Tile(keys=64, stages=2),
}
# A tile of the bias takes 512 bytes a key in float32.
_BIASED = {
    (64, 64): Tile(keys=64, stages=2),
    (96, 96): Tile(keys=64, stages=2),
    (128, 128): Tile(keys=64, stages=2),
    (192, 128): Tile(keys=64, stages=2),
    (192, 192): Tile(keys=64, stages=2, bias_stages=1),
    (256, 256): Tile(keys=64, stages=2, bias_stages=1),
}

HEAD_SIZES = tuple(_PLAIN)
"""Of keys and values that there are kernels for."""


def tile_for(head_dim: int, v_head_dim: int, bias: Any = None) -> Tile:
    """The tile for these head sizes, and a bias of this dtype or none."""
    return (_PLAIN if bias is None else _BIASED)[head_dim, v_head_dim]
