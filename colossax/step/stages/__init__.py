"""One program for all stages of a pipeline: gradients, and totals without a step."""

from .gradients import pipelined as pipelined
from .totals import pipelined_totals as pipelined_totals
