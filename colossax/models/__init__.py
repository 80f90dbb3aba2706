"""Model families, from shared parts."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .bloom import BloomConfig as BloomConfig
    from .gpt2 import GPT2Config as GPT2Config
    from .gpt_oss import GPTOSSConfig as GPTOSSConfig
    from .llama import LlamaConfig as LlamaConfig
    from .llama4 import Llama4Config as Llama4Config
    from .mistral import MistralConfig as MistralConfig
    from .mixtral import MixtralConfig as MixtralConfig
    from .olmoe import OLMoEConfig as OLMoEConfig
    from .opt import OPTConfig as OPTConfig
    from .qwen2 import Qwen2Config as Qwen2Config
    from .qwen2_moe import Qwen2MoEConfig as Qwen2MoEConfig
    from .qwen3 import Qwen3Config as Qwen3Config
    from .qwen3_moe import Qwen3MoEConfig as Qwen3MoEConfig
    from .registry import FAMILIES as FAMILIES
    from .registry import Family as Family
    from .registry import config_from_json as config_from_json
    from .registry import config_to_json as config_to_json
    from .registry import family_of as family_of
    from .registry import maker as maker
else:
    __getattr__, __dir__ = lazily(__name__)
