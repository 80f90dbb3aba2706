"""A program for each stage of a pipeline, on its devices alone: for uneven stages."""

from .given import check_programs as check_programs
from .update import StageUpdate as StageUpdate
