"""Collectives, run and measured."""

from .trials import Trial as Trial
from .trials import run_trials as run_trials
from .trials import within as within
