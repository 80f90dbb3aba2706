"""The fastest plan that fits: every mesh scored by formula, the best of them compiled."""

from .asked import Asked as Asked
from .by_hand import predict as predict
from .calibrated import calibrated_by as calibrated_by
from .meshes import AXES as AXES
from .own import plan as plan
from .pins import asked_of as asked_of
from .planned import Answer as Answer
from .planned import Planned as Planned
from .planned import plan_run as plan_run
from .predicting import Prediction as Prediction
from .verifying import Subject as Subject
