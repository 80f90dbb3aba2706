"""Schedules of a pipeline as data: made, checked, priced and drawn without JAX."""

from .schedules import FORMS as FORMS
from .schedules import SCHEDULES as SCHEDULES
from .schedules import schedule as schedule
from .table import Kind as Kind
from .table import Op as Op
from .table import Table as Table
