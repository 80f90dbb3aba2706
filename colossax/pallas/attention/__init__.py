"""Softmax attention on one device: masks, implementations, blocks, and attention to a cache."""

from colossax.pallas.dropout import PairDropout as PairDropout

from .api import attend as attend
from .api import attention as attention
from .api import declined_by as declined_by
from .api import with_ranges as with_ranges
from .block import attend_block as attend_block
from .block import backward_block as backward_block
from .block import block_gradients as block_gradients
from .block import block_implementation as block_implementation
from .block import block_ranges as block_ranges
from .block import forward_block as forward_block
from .cache import ReadSlots as ReadSlots
from .cache import attend_cache as attend_cache
from .cache import keys_and_values as keys_and_values
from .heavy import Heavy as Heavy
from .kept import Kept as Kept
from .mask import Mask as Mask
from .mask import dense as dense
from .mask import row_ranges as row_ranges
from .mask import why_no_ranges as why_no_ranges
from .merge import merge_blocks as merge_blocks
from .merge import row_delta as row_delta
from .merge import with_sinks as with_sinks
from .operands import Operands as Operands
from .operands import Scoring as Scoring
from .pages import Branches as Branches
from .pages import Pages as Pages
from .proof import variants as variants
from .relative import RelativeBias as RelativeBias
from .retrieved import Retrieved as Retrieved
from .retrieved import attend_retrieved as attend_retrieved
from .retrieved import mean_keys as mean_keys
from .spec import AttentionSpec as AttentionSpec
