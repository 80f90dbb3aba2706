"""Plans for serving: most tokens a second of an engine that fits, found like plans for training."""

from .planned import PlannedServing as PlannedServing
from .planned import ServingAnswer as ServingAnswer
from .planned import plan_serving as plan_serving
from .search import Wish as Wish
from .served import Served as Served
