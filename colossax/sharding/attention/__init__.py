"""Attention by a plan: over tokens that devices share, and over caches."""

from .attend import attention as attention
from .cache import CACHE_DIMS as CACHE_DIMS
from .cache import attend_cache as attend_cache
from .cache import cache_spec as cache_spec
from .cache import heads_axes as heads_axes
from .ranges import with_ranges as with_ranges
from .retrieved import MEAN_DIMS as MEAN_DIMS
from .retrieved import attend_retrieved as attend_retrieved
