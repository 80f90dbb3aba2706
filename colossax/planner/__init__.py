"""What a plan leaves open, decided; what a step needs, counted."""

from .building import boost as boost
from .building import build_step as build_step
from .counting.compiled import settle_for_target as settle_for_target
from .counting.compiled import settle_task_for_target as settle_task_for_target
from .counting.inspection import Inspection as Inspection
from .counting.inspection import compare as compare
from .counting.inspection import inspect_run as inspect_run
from .counting.inspection import inspect_task as inspect_task
from .counting.stage_programs import Edge as Edge
from .counting.stage_programs import ProgramsCost as ProgramsCost
from .counting.stage_programs import StageFacts as StageFacts
from .counting.traffic import HIDING_FORMULA as HIDING_FORMULA
from .counting.traffic import HostTraffic as HostTraffic
from .deciding.candidates import LayoutCost as LayoutCost
from .deciding.candidates import compare_layouts as compare_layouts
from .deciding.fitting import Fitted as Fitted
from .deciding.fitting import fit_offload as fit_offload
from .deciding.largest import largest_microbatch as largest_microbatch
from .deciding.settling import Facts as Facts
from .deciding.settling import Settled as Settled
from .deciding.settling import settle as settle
from .loss_equality import check_pipelined as check_pipelined
