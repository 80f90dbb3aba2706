"""A decoder's sizes and parts, as data: nothing in here imports JAX."""

from .adapter import AdapterConfig as AdapterConfig
from .decoder import GATED_ACTIVATIONS as GATED_ACTIVATIONS
from .decoder import DecoderConfig as DecoderConfig
from .drafter import DrafterConfig as DrafterConfig
from .dropout import DropoutConfig as DropoutConfig
from .family import FamilyConfig as FamilyConfig
from .frames import FramesConfig as FramesConfig
from .head import HeadConfig as HeadConfig
from .head import TransformConfig as TransformConfig
from .mixture import MixtureConfig as MixtureConfig
from .pair import EncoderDecoderConfig as EncoderDecoderConfig
from .parts import DynamicScaling as DynamicScaling
from .parts import LatentConfig as LatentConfig
from .parts import LinearScaling as LinearScaling
from .parts import Llama3Scaling as Llama3Scaling
from .parts import LongScaling as LongScaling
from .parts import QueryGrowth as QueryGrowth
from .parts import RelativeConfig as RelativeConfig
from .parts import RopeConfig as RopeConfig
from .parts import RopeScaling as RopeScaling
from .parts import YarnScaling as YarnScaling
from .patches import PatchConfig as PatchConfig
