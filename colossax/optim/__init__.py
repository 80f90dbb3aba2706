"""Optimizers that know the names of dims, and learning-rate schedules.

An optimizer here is `dims -> optax.GradientTransformation`, where `dims` has the structure of the
parameters and tuples of dim names as leaves: what must be done per layer of a stack, per expert or
to matrices alone is decided by names, so that a stacked and an unrolled model train alike.
"""

from .averaged import averaged as averaged
from .averaged import ema as ema
from .averaged import schedule_free as schedule_free
from .by_model import ByModel as ByModel
from .by_model import Optimizer as Optimizer
from .by_model import map_moments as map_moments
from .by_model import steps_of as steps_of
from .by_model import transformation as transformation
from .contract import DimsOptimizer as DimsOptimizer
from .contract import is_layerwise as is_layerwise
from .contract import layerwise as layerwise
from .dims import decay_mask as decay_mask
from .dims import decays as decays
from .factored import adafactor as adafactor
from .factored import came as came
from .galore import galore as galore
from .groups import Groups as Groups
from .groups import check_groups as check_groups
from .muon import muon as muon
from .optimizers import adamw as adamw
from .optimizers import lamb as lamb
from .optimizers import lars as lars
from .optimizers import lion as lion
from .optimizers import sgd as sgd
from .quantised import adamw_8bit as adamw_8bit
from .rounding import applied as applied
from .rounding import rounding_key as rounding_key
from .rounding import stochastic_round as stochastic_round
from .schedules import constant as constant
from .schedules import inverse_sqrt as inverse_sqrt
from .schedules import linear as linear
from .schedules import multistep as multistep
from .schedules import one_cycle as one_cycle
from .schedules import polynomial as polynomial
from .schedules import warmup_cosine as warmup_cosine
from .schedules import wsd as wsd
