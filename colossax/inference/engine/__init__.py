"""Many requests at once by one compiled step: flat tokens, seats, a paged cache."""

from .drafting import Drafter as Drafter
from .drafting import ModelDrafter as ModelDrafter
from .drafting import NgramDrafter as NgramDrafter
from .engine import Constraint as Constraint
from .engine import Engine as Engine
from .engine import EngineStats as EngineStats
