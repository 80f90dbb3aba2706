"""The workshop of Mosaic GPU kernels: one source for hardware and for the interpreter."""

from .hardware import multiprocessors as multiprocessors
from .hardware import why_not_hardware as why_not_hardware
from .hardware import why_slow as why_slow
from .launch import SHARED_BYTES as SHARED_BYTES
from .launch import WARPGROUP_ROWS as WARPGROUP_ROWS
from .launch import launch as launch
from .launch import matrix as matrix
from .launch import shared_bytes as shared_bytes
from .launch import vector as vector
from .ops import LAYOUT as LAYOUT
from .ops import Ops as Ops
from .ops import spread as spread
from .ops import tanh as tanh
from .stages import Stages as Stages
from .stages import stage_barriers as stage_barriers
