"""Qwen 3's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.qwen3.config import Qwen3Config
from colossax.models.settings import first_eos, plain_rope, rope_to_settings, unsupported_window


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    unsupported_window(settings)
    return {**plain_rope(settings), **first_eos(settings)}


def _write(config: Qwen3Config) -> dict[str, Any]:
    return {**rope_to_settings(config.rope_theta), "eos_token_id": config.eos}


CONVERSION = Conversion(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    settings=(
        *SETTINGS,
        setting("head_dim", "head_dim", default=128),
        setting("max_seq", "max_position_embeddings", default=32_768),
    ),
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
