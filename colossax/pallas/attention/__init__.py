"""Softmax attention on one device: masks, implementations, and attention to a cache."""

from .api import attention as attention
from .cache import attend_cache as attend_cache
from .mask import Mask as Mask
from .mask import dense as dense
from .mask import row_ranges as row_ranges
from .mask import why_no_ranges as why_no_ranges
