"""Parts of models in Flax NNX: layers, stacks, the decoder, losses."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from colossax.layerwise import LayerState as LayerState

    from .adapters.adapter import has_adapter as has_adapter
    from .adapters.adapter import with_adapter as with_adapter
    from .adapters.adapter import without_adapter as without_adapter
    from .attention import Attention as Attention
    from .attention import AttentionShape as AttentionShape
    from .attention import FlatTokens as FlatTokens
    from .attention import Side as Side
    from .attention import alibi_slopes as alibi_slopes
    from .block import ACTIVATIONS as ACTIVATIONS
    from .block import MLP as MLP
    from .block import Block as Block
    from .block import Sublayer as Sublayer
    from .block import Wiring as Wiring
    from .cache import CacheArray as CacheArray
    from .cache import CacheSpec as CacheSpec
    from .cache import window_slots as window_slots
    from .config.adapter import AdapterConfig as AdapterConfig
    from .config.decoder import DecoderConfig as DecoderConfig
    from .config.decoder import LayerCount as LayerCount
    from .config.drafter import DrafterConfig as DrafterConfig
    from .config.dropout import DropoutConfig as DropoutConfig
    from .config.dual import DualEncoderConfig as DualEncoderConfig
    from .config.dual import EncoderPart as EncoderPart
    from .config.family import DecoderSizes as DecoderSizes
    from .config.family import EncoderSizes as EncoderSizes
    from .config.family import FamilyConfig as FamilyConfig
    from .config.family import even_head_dim as even_head_dim
    from .config.family import every as every
    from .config.frames import FramesConfig as FramesConfig
    from .config.head import HeadConfig as HeadConfig
    from .config.head import TransformConfig as TransformConfig
    from .config.mixture import MixtureConfig as MixtureConfig
    from .config.pair import EncoderDecoderConfig as EncoderDecoderConfig
    from .config.parts import DynamicScaling as DynamicScaling
    from .config.parts import LatentConfig as LatentConfig
    from .config.parts import LinearScaling as LinearScaling
    from .config.parts import Llama3Scaling as Llama3Scaling
    from .config.parts import LongScaling as LongScaling
    from .config.parts import QueryGrowth as QueryGrowth
    from .config.parts import RelativeConfig as RelativeConfig
    from .config.parts import RopeConfig as RopeConfig
    from .config.parts import RopeScaling as RopeScaling
    from .config.parts import YarnScaling as YarnScaling
    from .config.patches import PatchConfig as PatchConfig
    from .config.seeing import ProjectorConfig as ProjectorConfig
    from .config.seeing import SeeingConfig as SeeingConfig
    from .decoder.decoder import Decoder as Decoder
    from .decoder.dual_encoder import DualEncoder as DualEncoder
    from .decoder.encoder_decoder import EncoderDecoder as EncoderDecoder
    from .decoder.head import with_new_head as with_new_head
    from .decoder.layers import Layers as Layers
    from .decoder.layers import decoder_layer as decoder_layer
    from .decoder.layers import expert_layer as expert_layer
    from .decoder.seeing import SeeingDecoder as SeeingDecoder
    from .drafting.drafter import Drafter as Drafter
    from .drafting.drafter import as_target as as_target
    from .drafting.drafter import drafter_maker as drafter_maker
    from .drafting.reading import TargetPages as TargetPages
    from .drafting.reading import block_mask as block_mask
    from .drafting.reading import target_pages as target_pages
    from .experts import Experts as Experts
    from .initialising import initialise as initialise
    from .language_model import LanguageModel as LanguageModel
    from .latent import LatentAttention as LatentAttention
    from .latent import LatentShape as LatentShape
    from .layers import Embedding as Embedding
    from .layers import LayerNorm as LayerNorm
    from .layers import Linear as Linear
    from .layers import RMSNorm as RMSNorm
    from .loss.cross_entropy import VocabParts as VocabParts
    from .loss.cross_entropy import cross_entropy as cross_entropy
    from .loss.divergence import kl_divergence as kl_divergence
    from .loss.token_logps import token_logps as token_logps
    from .module import MakeModel as MakeModel
    from .module import MakeModels as MakeModels
    from .module import ModelSpec as ModelSpec
    from .module import describe as describe
    from .module import param as param
    from .module import pure as pure
    from .named_models import Models as Models
    from .plain.foreign import with_gathers as with_gathers
    from .plain.naming import GivenDims as GivenDims
    from .plain.naming import named as named
    from .plain.naming import renamed as renamed
    from .rope import rope_tables as rope_tables
    from .rope import rotate as rotate
    from .stack.recurrence import run_recurrence as run_recurrence
    from .stack.stack import LayerStack as LayerStack
    from .stack.stack import StackOutput as StackOutput
    from .weights import MakeWeight as MakeWeight
    from .weights import Weighted as Weighted
    from .weights import weight_of as weight_of
    from .weights import with_weights as with_weights
else:
    __getattr__, __dir__ = lazily(__name__)
