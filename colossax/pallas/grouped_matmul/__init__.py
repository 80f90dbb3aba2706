"""Groups of rows, each times a matrix of its own."""

from .api import declined_by as declined_by
from .api import grouped_matmul as grouped_matmul
from .proof import variants as variants
from .spec import GroupedSpec as GroupedSpec
