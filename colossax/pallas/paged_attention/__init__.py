"""Attention of groups of tokens to the pages that their sequences hold."""

from .api import Attended as Attended
from .api import choose as choose
from .api import declined_by as declined_by
from .api import paged_attention as paged_attention
from .api import spec_of as spec_of
from .mass import Mass as Mass
from .seen import Seen as Seen
from .spec import PagedSpec as PagedSpec
from .spec import variants as variants
