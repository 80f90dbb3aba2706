"""A program for each stage of a pipeline, on its devices alone: for uneven stages."""

from .ahead import Ran as Ran
from .ahead import Rehearsal as Rehearsal
from .given import check_programs as check_programs
from .rehearsed import Rehearsed as Rehearsed
from .rehearsed import RehearsedStage as RehearsedStage
from .rehearsed import rehearsed as rehearsed
from .update import StageUpdate as StageUpdate
