"""Qwen 2 with experts: names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting
from colossax.models.expert_links import (
    QWEN_LINKS,
    QWEN_SETTINGS,
    check_mlp_only,
    qwen_taught,
)
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.qwen2_moe.config import Qwen2MoEConfig
from colossax.models.rope_settings import plain_rope, write_rope
from colossax.models.settings import first_eos, unsupported_window


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    unsupported_window(settings)
    check_mlp_only(settings)
    return {**plain_rope(settings), **first_eos(settings), **qwen_taught(settings)}


def _write(config: Qwen2MoEConfig) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta),
        "eos_token_id": config.eos,
        "mlp_only_layers": [],
    }


CONVERSION = Conversion(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=Qwen2MoEConfig,
    settings=(
        *SETTINGS,
        *QWEN_SETTINGS,
        setting("experts", "num_experts", "num_local_experts"),
        setting("shared_mlp", "shared_expert_intermediate_size"),
        setting("max_seq", "max_position_embeddings", default=32_768),
    ),
    fixed={"hidden_act": ("silu",), "qkv_bias": (True,), "use_sliding_window": (False,)},
    links=(*LINKS, *QWEN_LINKS),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
