"""Attention over a sequence that is split between devices.

Every function here is local: it runs inside `jax.shard_map(..., check_vma=False)`, manual over the
whole mesh, and knows arrays, axis names and sizes, nothing of plans. The schemes share one
interface and differ in what they send; `ulysses_local` goes around any of them.
"""

from .axes import RingAxes as RingAxes
from .gather import gather_attention_local as gather_attention_local
from .masks import RingMasks as RingMasks
from .masks import gathered_masks_local as gathered_masks_local
from .masks import ring_masks_local as ring_masks_local
from .order import Order as Order
from .order import inverse_order as inverse_order
from .order import positions_local as positions_local
from .order import zigzag_order as zigzag_order
from .ring import DOUBLE_RING_OPTIONS as DOUBLE_RING_OPTIONS
from .ring import ring_attention_local as ring_attention_local
from .self_attention import ring_self_attention_local as ring_self_attention_local
from .settings import Settings as Settings
from .turn import balanced_from_contiguous_local as balanced_from_contiguous_local
from .turn import contiguous_from_balanced_local as contiguous_from_balanced_local
from .ulysses import ulysses_local as ulysses_local
