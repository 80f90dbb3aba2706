"""Mistral's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.conversion import Conversion, setting
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.mistral.config import MistralConfig
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import checked, first_eos


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    kind = "full_attention" if settings.get("sliding_window", 4096) is None else "sliding_attention"
    for layer_type in checked("layer_types", settings.get("layer_types"), list | None) or ():
        if layer_type != kind:
            raise InputError(
                f"config.json: a layer of type {layer_type!r} among others is not supported;"
                f" only {kind!r} in all layers is"
            )
    return {**read_rope(settings), **first_eos(settings)}


def _write(config: MistralConfig) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=MistralConfig,
    settings=(
        *SETTINGS,
        setting("head_dim", "head_dim", default=None),
        setting("max_seq", "max_position_embeddings", default=131_072),
        setting("window", "sliding_window", default=4096),
    ),
    fixed={"hidden_act": ("silu",)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
