"""What an engine is asked, and what it says: values that the scheduler and the server share."""

from colossax.scheduling import Emitted as Emitted
from colossax.scheduling import EngineRequest as EngineRequest
from colossax.scheduling import SamplingConfig as SamplingConfig
from colossax.scheduling.request import MOST_BIASED as MOST_BIASED
from colossax.scheduling.request import MOST_LOGPROBS as MOST_LOGPROBS
