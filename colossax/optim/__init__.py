"""Optimizers that know the names of dims, and learning-rate schedules.

An optimizer here is `dims -> optax.GradientTransformation`, where `dims` has the structure of the
parameters and tuples of dim names as leaves: what must be done per layer of a stack, per expert or
to matrices alone is decided by names, so that a stacked and an unrolled model train alike.
"""

from .by_model import ByModel as ByModel
from .by_model import Optimizer as Optimizer
from .by_model import map_moments as map_moments
from .by_model import steps_of as steps_of
from .by_model import transformation as transformation
from .dims import decay_mask as decay_mask
from .dims import decays as decays
from .optimizers import DimsOptimizer as DimsOptimizer
from .optimizers import adamw as adamw
from .optimizers import is_layerwise as is_layerwise
from .optimizers import lamb as lamb
from .optimizers import lars as lars
from .optimizers import layerwise as layerwise
from .optimizers import sgd as sgd
from .rounding import stochastic_round as stochastic_round
from .schedules import constant as constant
from .schedules import inverse_sqrt as inverse_sqrt
from .schedules import linear as linear
from .schedules import multistep as multistep
from .schedules import one_cycle as one_cycle
from .schedules import polynomial as polynomial
from .schedules import warmup_cosine as warmup_cosine
from .schedules import wsd as wsd
