"""Matmuls in regions of our own: 2d, 2.5d and 3d layouts, and gathers under the multiplication."""

from .cost import Widths as Widths
from .cost import sent_items as sent_items
from .island import Island as Island
from .island import matmuls as matmuls
from .layout import layout_of as layout_of
from .packed import PackedLayout as PackedLayout
from .packed import packed_layout as packed_layout
