"""What a model is read to take, against formulas for published sizes and against traced policies."""

import dataclasses
import itertools
import math

import jax
import pytest

from colossax.aot import parse_target
from colossax.config import AttentionConfig, BatchConfig, Precision, Segment
from colossax.nn import NamedModel  # noqa: F401
from colossax.planner.counting.layer_costs import CutStep
from colossax.planner.counting.one_layer import layer_flops, traced_layer
from colossax.planner.profiling import profile_task
from colossax.planner.task_step import task_step
from colossax.recipes import recipe
from colossax.tasks import task_of

TARGET = parse_target("h100:1x8")
