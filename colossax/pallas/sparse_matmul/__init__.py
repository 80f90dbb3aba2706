"""Few rows times a matrix of which some of each four inputs are kept."""

from .api import choose as choose
from .api import declined_by as declined_by
from .api import sparse_matmul as sparse_matmul
from .spec import FOUR as FOUR
from .spec import SparseSpec as SparseSpec
from .spec import variants as variants
from .xla import expanded as expanded
