"""Model families, from shared parts."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .altered import merged as merged
    from .altered import most_used as most_used
    from .altered import pruned as pruned
    from .altered import upcycled as upcycled
    from .bart import BARTConfig as BARTConfig
    from .bert import BERTConfig as BERTConfig
    from .bloom import BloomConfig as BloomConfig
    from .clip import CLIPConfig as CLIPConfig
    from .cohere import CohereConfig as CohereConfig
    from .deepseek_v2 import DeepSeekV2Config as DeepSeekV2Config
    from .deepseek_v3 import DeepSeekV3Config as DeepSeekV3Config
    from .dinov2 import DINOv2Config as DINOv2Config
    from .falcon import FalconConfig as FalconConfig
    from .gemma2 import Gemma2Config as Gemma2Config
    from .gemma3 import Gemma3Config as Gemma3Config
    from .glm import GLMConfig as GLMConfig
    from .glm4 import GLM4Config as GLM4Config
    from .gpt2 import GPT2Config as GPT2Config
    from .gpt_neox import GPTNeoXConfig as GPTNeoXConfig
    from .gpt_oss import GPTOSSConfig as GPTOSSConfig
    from .gptj import GPTJConfig as GPTJConfig
    from .llama import LlamaConfig as LlamaConfig
    from .llama4 import Llama4Config as Llama4Config
    from .llava import LlavaConfig as LlavaConfig
    from .mistral import MistralConfig as MistralConfig
    from .mixtral import MixtralConfig as MixtralConfig
    from .modernbert import ModernBERTConfig as ModernBERTConfig
    from .olmo2 import OLMo2Config as OLMo2Config
    from .olmoe import OLMoEConfig as OLMoEConfig
    from .opt import OPTConfig as OPTConfig
    from .parameters import CHAT_DOCUMENT as CHAT_DOCUMENT
    from .parameters import ModelParams as ModelParams
    from .parameters import params_of_checkpoint as params_of_checkpoint
    from .parameters import params_of_tree as params_of_tree
    from .parameters import write_checkpoint as write_checkpoint
    from .phi3 import Phi3Config as Phi3Config
    from .qwen2 import Qwen2Config as Qwen2Config
    from .qwen2_moe import Qwen2MoEConfig as Qwen2MoEConfig
    from .qwen2_vl import Qwen2VLConfig as Qwen2VLConfig
    from .qwen3 import Qwen3Config as Qwen3Config
    from .qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
    from .registry import FAMILIES as FAMILIES
    from .registry import Family as Family
    from .registry import add_family as add_family
    from .registry import config_from_json as config_from_json
    from .registry import config_to_json as config_to_json
    from .registry import family_of as family_of
    from .registry import maker as maker
    from .roberta import RoBERTaConfig as RoBERTaConfig
    from .siglip import SigLIPConfig as SigLIPConfig
    from .smollm3 import SmolLM3Config as SmolLM3Config
    from .starcoder2 import StarCoder2Config as StarCoder2Config
    from .student import with_layers as with_layers
    from .t5 import T5Config as T5Config
    from .vit import ViTConfig as ViTConfig
    from .whisper import WhisperConfig as WhisperConfig
else:
    __getattr__, __dir__ = lazily(__name__)
