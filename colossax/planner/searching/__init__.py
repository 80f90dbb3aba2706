"""The fastest plan that fits: every mesh scored by formula, the best of them compiled."""

from .meshes import AXES as AXES
from .planned import Answer as Answer
from .planned import Planned as Planned
from .planned import plan_run as plan_run
from .predicting import Prediction as Prediction
from .predicting import predict as predict
from .search import Asked as Asked
from .verifying import Subject as Subject
