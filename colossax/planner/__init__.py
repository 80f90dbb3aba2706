"""What a plan leaves open, decided; what a step needs, counted."""

from .building import boost as boost
from .building import build_step as build_step
from .candidates import LayoutCost as LayoutCost
from .candidates import compare_layouts as compare_layouts
from .compiled import settle_for_target as settle_for_target
from .compiled import settle_task_for_target as settle_task_for_target
from .fitting import Fitted as Fitted
from .fitting import fit_offload as fit_offload
from .inspection import Inspection as Inspection
from .inspection import compare as compare
from .inspection import inspect_run as inspect_run
from .inspection import inspect_task as inspect_task
from .largest import largest_microbatch as largest_microbatch
from .loss_equality import check_pipelined as check_pipelined
from .settling import Facts as Facts
from .settling import Settled as Settled
from .settling import settle as settle
from .stage_programs import Edge as Edge
from .stage_programs import ProgramsCost as ProgramsCost
from .stage_programs import StageFacts as StageFacts
from .traffic import HIDING_FORMULA as HIDING_FORMULA
from .traffic import HostTraffic as HostTraffic
