"""GLM's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting
from colossax.models.glm.config import GLMConfig
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.phi3.convert import GATE_UP
from colossax.models.rope_settings import read_rope, read_rope_dims, rope_share, write_rope
from colossax.models.settings import first_eos

_APART = ("gate_proj", "up_proj", "o_proj.bias")

GLM_LINKS = (
    *(entry for entry in LINKS if not any(name in entry.foreign for name in _APART)),
    GATE_UP,
)

GLM_SETTINGS = (
    *SETTINGS,
    setting("head_dim", "head_dim", default=128),
    setting("max_seq", "max_position_embeddings", default=131_072),
    setting("attention_bias", "attention_bias", default=True),
)


def read_glm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What both families read."""
    head_dim = settings.get("head_dim", 128)
    return {
        **read_rope(settings, partial=True),
        "rope_dims": read_rope_dims(settings, head_dim, default=0.5),
        **first_eos(settings),
    }


def write_glm(config: GLMConfig) -> dict[str, Any]:
    """What both families write."""
    share = rope_share(config.rope_dims or config.head_dim, config.head_dim)
    return {
        **write_rope(config.rope_theta, config.rope_scaling, share=share),
        "eos_token_id": config.eos,
        "pad_token_id": None,
    }


CONVERSION = Conversion(
    model_type="glm",
    architecture="GlmForCausalLM",
    config=GLMConfig,
    settings=GLM_SETTINGS,
    fixed={"hidden_act": ("silu",)},
    links=GLM_LINKS,
    ignored=IGNORED,
    read=read_glm,
    write=write_glm,
)
