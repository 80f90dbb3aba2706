"""Training: losses, the step, the loop."""

from .building import boost as boost
from .building import build_step as build_step
from .fitting import Fitted as Fitted
from .fitting import fit_offload as fit_offload
from .loss import Loss as Loss
from .loss import any_order as any_order
from .loss import next_token_loss as next_token_loss
from .step import Step as Step
from .step import StepOptions as StepOptions
