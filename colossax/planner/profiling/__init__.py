"""What a model is to a planner: its matrices, what multiplies them, and what backward needs."""

from .model import LayerKind as LayerKind
from .model import ModelProfile as ModelProfile
from .model import bare as bare
from .model import profile_task as profile_task
from .traced import KeptArray as KeptArray
from .traced import Map as Map
