"""One program for all stages of a pipeline: gradients, and totals without a step."""

from .forward import check_cut as check_cut
from .given import check_stages as check_stages
from .given import forward_table as forward_table
from .given import table_of as table_of
from .gradients import pipelined as pipelined
from .totals import pipelined_totals as pipelined_totals
