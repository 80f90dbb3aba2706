"""The plan in force, and the operations a model calls to be laid out by it."""

from .attention import attention as attention
from .compiling import compiler_options as compiler_options
from .context import current as current
from .context import recomputing as recomputing
from .context import use as use
from .lookup import lookup as lookup
from .ops import compute_dtype as compute_dtype
from .ops import constrain as constrain
from .ops import gather_weight as gather_weight
from .ops import linear as linear
from .ops import linears as linears
from .ops import reduction_dtype as reduction_dtype
from .order import NATURAL as NATURAL
from .order import RowOrder as RowOrder
from .order import balanced_order as balanced_order
from .order import current_order as current_order
from .order import in_order as in_order
from .rules import activation_axes as activation_axes
from .rules import activation_sharding as activation_sharding
from .rules import batch_axes as batch_axes
from .rules import explain as explain
from .rules import param_sharding as param_sharding
from .rules import replicated as replicated
from .rules import resolve as resolve
from .rules import seq_axes as seq_axes
from .rules import validate as validate
