"""The training step: a pure program of a settled plan."""

from .loss import Loss as Loss
from .loss import any_order as any_order
from .loss import whole_batch as whole_batch
from .options import StepOptions as StepOptions
from .step import Step as Step
