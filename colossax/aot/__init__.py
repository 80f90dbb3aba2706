"""Programs for GPUs that are not there: compile them, count their bytes, check their schedule."""

from .collectives import Collective as Collective
from .collectives import Totals as Totals
from .collectives import assert_collectives as assert_collectives
from .collectives import collectives as collectives
from .collectives import totals as totals
from .compile import Program as Program
from .compile import compile_program as compile_program
from .compile import host_sharding as host_sharding
from .compile import target_devices as target_devices
from .memory import Buffer as Buffer
from .memory import MemoryReport as MemoryReport
from .memory import memory_report as memory_report
from .saved import checkpoint_stacks as checkpoint_stacks
from .targets import Gpu as Gpu
from .targets import Link as Link
from .targets import Target as Target
from .targets import gpu_keys as gpu_keys
from .targets import parse_target as parse_target
