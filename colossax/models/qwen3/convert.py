"""Qwen 3's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.qwen2.convert import read_window, write_window
from colossax.models.qwen3.config import Qwen3Config
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings), **read_window(settings), **first_eos(settings)}


def _write(config: Qwen3Config) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        **write_window(config),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    settings=(
        *SETTINGS,
        setting("head_dim", "head_dim", default=128),
        setting("max_seq", "max_position_embeddings", default=32_768),
    ),
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
