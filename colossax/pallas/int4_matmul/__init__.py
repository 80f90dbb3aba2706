"""Few rows times a matrix of four bits a weight."""

from .api import choose as choose
from .api import declined_by as declined_by
from .api import int4_matmul as int4_matmul
from .spec import GROUP as GROUP
from .spec import Int4Spec as Int4Spec
from .spec import variants as variants
