"""What an engine is asked, and what it says: values that the scheduler and the server share."""

from colossax.scheduling import Emitted as Emitted
from colossax.scheduling import EngineRequest as EngineRequest
from colossax.scheduling import SamplingConfig as SamplingConfig
