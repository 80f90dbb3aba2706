"""Configuration: the Plan, its presets and its binding to devices."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

from .axes import GROUP_AXES as GROUP_AXES
from .axes import LOGICAL_DIMS as LOGICAL_DIMS
from .axes import MESH_AXES as MESH_AXES
from .axes import RING_AXES as RING_AXES
from .axes import SEQUENCE_AXES as SEQUENCE_AXES
from .axes import MeshAxis as MeshAxis
from .bounds import GREEDY_OR_MORE as GREEDY_OR_MORE
from .bounds import Bound as Bound
from .bounds import ClipNorm as ClipNorm
from .bounds import Count as Count
from .bounds import Decay as Decay
from .bounds import Natural as Natural
from .bounds import NotNegative as NotNegative
from .bounds import Positive as Positive
from .bounds import Seed as Seed
from .bounds import Share as Share
from .bounds import Temperature as Temperature
from .bounds import above as above
from .bounds import at_least as at_least
from .bounds import bound_of as bound_of
from .bounds import within as within
from .cache import cache_folder as cache_folder
from .experts import ExpertRates as ExpertRates
from .experts import ExpertsConfig as ExpertsConfig
from .frozen import FrozenDict as FrozenDict
from .frozen import check_types as check_types
from .frozen import from_json as from_json
from .frozen import to_json as to_json
from .offload import HOST_KINDS as HOST_KINDS
from .offload import PIPELINED_OPTION as PIPELINED_OPTION
from .offload import SHARES as SHARES
from .offload import STATE_KINDS as STATE_KINDS
from .offload import OffloadConfig as OffloadConfig
from .parts import AttentionConfig as AttentionConfig
from .parts import BatchConfig as BatchConfig
from .parts import LossConfig as LossConfig
from .parts import PipelineConfig as PipelineConfig
from .parts import Segment as Segment
from .paths import check_text as check_text
from .paths import user_path as user_path
from .placement import SAVEABLE as SAVEABLE
from .placement import Placement as Placement
from .plan import Plan as Plan
from .precision import Float8 as Float8
from .precision import LossScale as LossScale
from .precision import Precision as Precision
from .presets import PRESETS as PRESETS
from .presets import preset as preset
from .rules import Rules as Rules
from .words import misspelt as misspelt
from .words import nearest as nearest

if TYPE_CHECKING:
    from .binding import BoundPlan as BoundPlan
    from .binding import bind as bind
else:
    __getattr__, __dir__ = lazily(__name__)
