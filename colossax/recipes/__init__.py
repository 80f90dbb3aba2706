"""Recipes: functions that return a `TrainConfig`. A variant calls another and replaces fields."""

from .own import OwnTask as OwnTask
from .own import any_recipe as any_recipe
from .own import described as described
from .own import recipe_from_file as recipe_from_file
from .registry import DEFAULT_RECIPE as DEFAULT_RECIPE
from .registry import RECIPES as RECIPES
from .registry import recipe as recipe
