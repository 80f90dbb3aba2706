"""Many requests at once by one compiled step: flat tokens, seats, a paged cache."""

from .engine import Constraint as Constraint
from .engine import Engine as Engine
from .engine import EngineStats as EngineStats
from .making import make_engine as make_engine
from .replicas import Replicas as Replicas
