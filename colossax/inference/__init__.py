"""Inference: continuing a prompt with a cache of keys and values."""

from .cache import CacheLayout as CacheLayout
from .decode import Chunk as Chunk
from .decode import DecodeProgram as DecodeProgram
from .decode import Sampling as Sampling
from .fitting import Fitted as Fitted
from .fitting import fit_layers as fit_layers
from .generator import Generation as Generation
from .generator import Generator as Generator
from .loading import LoadedModel as LoadedModel
from .loading import StoredModel as StoredModel
from .loading import load as load
from .loading import open_checkpoint as open_checkpoint
from .plan import inference_plan as inference_plan
from .plan import together as together
from .scheduler import Call as Call
from .scheduler import Continuation as Continuation
from .scheduler import InOrder as InOrder
from .scheduler import Request as Request
from .scheduler import Scheduler as Scheduler
from .scheduler import check_length as check_length
from .scheduler import check_tokens as check_tokens
from .several import Several as Several
from .several import several as several
from .stages import Flight as Flight
from .stages import StagedProgram as StagedProgram
from .stages import Tick as Tick
