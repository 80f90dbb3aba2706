"""Recipes: functions that return a `TrainConfig`. A variant calls another and replaces fields."""

from .registry import DEFAULT_RECIPE as DEFAULT_RECIPE
from .registry import RECIPES as RECIPES
from .registry import recipe as recipe
