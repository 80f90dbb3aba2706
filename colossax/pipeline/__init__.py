"""Schedules of a pipeline as data: made, checked, priced, drawn; where stages are cut. No JAX."""

from .check import checked as checked
from .check import movable as movable
from .picture import plot_schedule as plot_schedule
from .schedules import SCHEDULES as SCHEDULES
from .schedules import schedule as schedule
from .simulate import Report as Report
from .simulate import simulate as simulate
from .table import FORMS as FORMS
from .table import Kind as Kind
from .table import Op as Op
from .table import Table as Table
from .timeline import Costs as Costs
