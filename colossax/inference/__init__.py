"""Inference: continuing a prompt with a cache of keys and values."""

from .fitting import Fitted as Fitted
from .fitting import fit_layers as fit_layers
from .generator import Generation as Generation
from .generator import Generator as Generator
from .loading import LoadedModel as LoadedModel
from .loading import StoredModel as StoredModel
from .loading import load as load
from .loading import open_checkpoint as open_checkpoint
from .plan import inference_plan as inference_plan
