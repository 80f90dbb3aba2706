"""Parts of models in Flax NNX: layers, stacks, the decoder, losses."""

from colossax.layerwise import LayerState as LayerState

from .attention import Attention as Attention
from .attention import AttentionShape as AttentionShape
from .attention import FlatTokens as FlatTokens
from .attention import Side as Side
from .attention import alibi_slopes as alibi_slopes
from .block import Block as Block
from .block import Sublayer as Sublayer
from .block import Wiring as Wiring
from .decoder import CacheSpec as CacheSpec
from .decoder import Decoder as Decoder
from .decoder import DecoderConfig as DecoderConfig
from .decoder import Layers as Layers
from .decoder import decoder_layer as decoder_layer
from .decoder import even_head_dim as even_head_dim
from .language_model import LanguageModel as LanguageModel
from .layers import ACTIVATIONS as ACTIVATIONS
from .layers import MLP as MLP
from .layers import Embedding as Embedding
from .layers import LayerNorm as LayerNorm
from .layers import Linear as Linear
from .layers import RMSNorm as RMSNorm
from .loss import cross_entropy as cross_entropy
from .module import MakeModel as MakeModel
from .module import ModelSpec as ModelSpec
from .module import describe as describe
from .module import initialise as initialise
from .module import param as param
from .module import pure as pure
from .rope import Llama3Scaling as Llama3Scaling
from .rope import RopeConfig as RopeConfig
from .rope import rope_tables as rope_tables
from .rope import rotate as rotate
from .stack import LayerStack as LayerStack
from .stack import StackOutput as StackOutput
