"""Requests, seats, pages and prefixes of a serving engine, in numbers of tokens; no JAX."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

from .checks import check_length as check_length
from .checks import check_tokens as check_tokens
from .keep import KEEPS as KEEPS
from .keep import Keep as Keep
from .reading import Heard as Heard
from .reading import Reads as Reads
from .reading import Seen as Seen
from .request import TOP_SHARE as TOP_SHARE
from .request import EngineRequest as EngineRequest
from .request import SamplingConfig as SamplingConfig

if TYPE_CHECKING:
    from .plan import Emitted as Emitted
    from .plan import Ended as Ended
    from .plan import Piece as Piece
    from .plan import Stats as Stats
    from .plan import StepPlan as StepPlan
    from .scheduler import Scheduler as Scheduler
else:
    __getattr__, __dir__ = lazily(__name__)
