"""What a plan leaves open, decided; what a step needs, counted."""

from .building import boost as boost
from .building import build_step as build_step
from .fitting import Fitted as Fitted
from .fitting import fit_offload as fit_offload
