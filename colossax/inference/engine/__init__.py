"""Many requests at once by one compiled step: flat tokens, seats, a paged cache."""

from .drafting import Drafter as Drafter
from .drafting import GlideDrafter as GlideDrafter
from .drafting import ModelDrafter as ModelDrafter
from .drafting import NgramDrafter as NgramDrafter
from .drafting import RetrievalDrafter as RetrievalDrafter
from .engine import Engine as Engine
from .formats import check_format as check_format
from .making import make_engine as make_engine
from .replicas import Replicas as Replicas
from .values import Constraint as Constraint
from .values import EngineStats as EngineStats
