"""Model families by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from colossax.config import from_json, nearest, to_json
from colossax.errors import InputError
from colossax.models.bart import BARTConfig
from colossax.models.bert import BERTConfig
from colossax.models.bloom import BloomConfig
from colossax.models.clip import CLIPConfig
from colossax.models.cohere import CohereConfig
from colossax.models.deepseek_v2 import DeepSeekV2Config
from colossax.models.deepseek_v3 import DeepSeekV3Config
from colossax.models.dinov2 import DINOv2Config
from colossax.models.falcon import FalconConfig
from colossax.models.gemma2 import Gemma2Config
from colossax.models.gemma3 import Gemma3Config
from colossax.models.glm import GLMConfig
from colossax.models.glm4 import GLM4Config
from colossax.models.gpt2 import GPT2Config
from colossax.models.gpt_neox import GPTNeoXConfig
from colossax.models.gpt_oss import GPTOSSConfig
from colossax.models.gptj import GPTJConfig
from colossax.models.llama import LlamaConfig
from colossax.models.llama4 import Llama4Config
from colossax.models.llava import LlavaConfig
from colossax.models.mistral import MistralConfig
from colossax.models.mixtral import MixtralConfig
from colossax.models.modernbert import ModernBERTConfig
from colossax.models.olmo2 import OLMo2Config
from colossax.models.olmoe import OLMoEConfig
from colossax.models.opt import OPTConfig
from colossax.models.phi3 import Phi3Config
from colossax.models.qwen2 import Qwen2Config
from colossax.models.qwen2_moe import Qwen2MoEConfig
from colossax.models.qwen2_vl import Qwen2VLConfig
from colossax.models.qwen3 import Qwen3Config
from colossax.models.qwen3_moe import Qwen3MoEConfig
from colossax.models.roberta import RoBERTaConfig
from colossax.models.siglip import SigLIPConfig
from colossax.models.smollm3 import SmolLM3Config
from colossax.models.starcoder2 import StarCoder2Config
from colossax.models.t5 import T5Config
from colossax.models.vit import ViTConfig
from colossax.models.whisper import WhisperConfig
from colossax.nn.config.family import FamilyConfig

if TYPE_CHECKING:
    from flax import nnx

    from colossax.models.conversion import Conversion
    from colossax.nn import LanguageModel, MakeModel


def decoder_of(config: Any, rngs: "nnx.Rngs") -> "LanguageModel":
    """The decoder that a family's configuration describes."""
    from colossax.nn import Decoder  # JAX, which configurations do without

    return Decoder(config.decoder(), rngs=rngs)


def encoder_decoder_of(config: Any, rngs: "nnx.Rngs") -> "LanguageModel":
    """The encoder and decoder that a family's configuration describes."""
    from colossax.nn import EncoderDecoder

    return EncoderDecoder(config.encoder(), config.decoder(), rngs=rngs)


def dual_encoder_of(config: Any, rngs: "nnx.Rngs") -> "nnx.Module":
    """The encoders of texts and of images that a family's configuration describes."""
    from colossax.nn import DualEncoder

    text, image = config.text_encoder(), config.image_encoder()
    first = {"log_scale": config.log_scale, "shift": config.shift}
    return DualEncoder(text, image, rngs=rngs, **first)


def seeing_decoder_of(config: Any, rngs: "nnx.Rngs") -> "LanguageModel":
    """The decoder, and the encoder of images that it reads, that a configuration describes."""
    from colossax.nn import SeeingDecoder

    parts = config.decoder(), config.image_encoder(), config.projector
    return SeeingDecoder(*parts, rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        name: In files and on the command line.
        config: Type of its configuration; has `decoder()`, the sizes that planning counts with.
        make: `(configuration, rngs) -> model`; default the decoder that it describes. A family with
            layers of its own builds one from parts, `Decoder(config, rngs=rngs, layers=...)`.
        conversion: How its files are read and written; None: by `CONVERSION` of the module
            `convert` beside that of `config`.
    """

    name: str
    config: type
    make: "Callable[[Any, nnx.Rngs], Any]" = decoder_of
    conversion: "Conversion | None" = None


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", config=LlamaConfig),
        Family(name="mistral", config=MistralConfig),
        Family(name="mixtral", config=MixtralConfig),
        Family(name="qwen2", config=Qwen2Config),
        Family(name="qwen2_moe", config=Qwen2MoEConfig),
        Family(name="qwen3", config=Qwen3Config),
        Family(name="qwen3_moe", config=Qwen3MoEConfig),
        Family(name="deepseek_v2", config=DeepSeekV2Config),
        Family(name="deepseek_v3", config=DeepSeekV3Config),
        Family(name="olmoe", config=OLMoEConfig),
        Family(name="gpt_oss", config=GPTOSSConfig),
        Family(name="llama4_text", config=Llama4Config),
        Family(name="gemma2", config=Gemma2Config),
        Family(name="gemma3_text", config=Gemma3Config),
        Family(name="olmo2", config=OLMo2Config),
        Family(name="smollm3", config=SmolLM3Config),
        Family(name="starcoder2", config=StarCoder2Config),
        Family(name="phi3", config=Phi3Config),
        Family(name="gpt_neox", config=GPTNeoXConfig),
        Family(name="gptj", config=GPTJConfig),
        Family(name="falcon", config=FalconConfig),
        Family(name="cohere", config=CohereConfig),
        Family(name="glm", config=GLMConfig),
        Family(name="glm4", config=GLM4Config),
        Family(name="gpt2", config=GPT2Config),
        Family(name="opt", config=OPTConfig),
        Family(name="bloom", config=BloomConfig),
        Family(name="bert", config=BERTConfig),
        Family(name="roberta", config=RoBERTaConfig),
        Family(name="modernbert", config=ModernBERTConfig),
        Family(name="vit", config=ViTConfig),
        Family(name="dinov2", config=DINOv2Config),
        Family(name="clip", config=CLIPConfig, make=dual_encoder_of),
        Family(name="siglip", config=SigLIPConfig, make=dual_encoder_of),
        Family(name="llava", config=LlavaConfig, make=seeing_decoder_of),
        Family(name="qwen2_vl", config=Qwen2VLConfig, make=seeing_decoder_of),
        Family(name="t5", config=T5Config, make=encoder_decoder_of),
        Family(name="bart", config=BARTConfig, make=encoder_decoder_of),
        Family(name="whisper", config=WhisperConfig, make=encoder_decoder_of),
    )
}


def add_family(family: Family) -> None:
    """Make a family of one's own known: to imports and exports, checkpoints and the command line.

    Raises:
        InputError: There is one of that name, or with that configuration.
    """
    for known in FAMILIES.values():
        if family.name == known.name or family.config is known.config:
            raise InputError(
                f"add_family: '{family.name}' has the name or the configuration of '{known.name}';"
                " give both of its own"
            )
    FAMILIES[family.name] = family


def family_of(config: Any) -> Family:
    """The family a configuration belongs to.

    Raises:
        InputError: It is no family's.
    """
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise InputError(f"model config: found {config!r}; give one of {known}")


def maker(config: Any) -> "MakeModel":
    """A factory for `boost` and `describe`: `rngs -> model`."""
    family = family_of(config)

    def make(rngs: "nnx.Rngs") -> Any:
        return family.make(config, rngs)

    return make


def config_to_json(config: Any) -> dict[str, Any]:
    """A configuration as JSON, its family's name included.

    What families got later, a head, a token that fills rows up and dropout, stands there where it
    is given, so that runs and checkpoints from before are what they were.
    """
    said = {"family": family_of(config).name, **to_json(config)}
    later = {field.name: field.default for field in dataclasses.fields(FamilyConfig)}
    lacking = {name for name, default in later.items() if getattr(config, name, None) == default}
    return {name: value for name, value in said.items() if name not in lacking}


def config_from_json(data: Any) -> Any:
    """The configuration `config_to_json` wrote.

    Raises:
        InputError: Unknown family or field, or a value that does not fit.
    """
    if not isinstance(data, Mapping):
        raise InputError(
            f"model config: expected an object of fields, found {data!r}; write {{...}}"
        )
    fields = dict(data)
    name = fields.pop("family", None)
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"model config: no family is called {name!r}{nearest(str(name), FAMILIES)}"
        )
    return from_json(FAMILIES[name].config, fields, where=f"{name} config")
