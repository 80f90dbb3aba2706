"""What planning found, told to people."""

from .columns import columns as columns
from .inspections import describe as describe
from .inspections import describe_layouts as describe_layouts
from .inspections import describe_many as describe_many
from .plans import describe_plans as describe_plans
from .rates import rate_lines as rate_lines
from .serving_plans import describe_serving as describe_serving
