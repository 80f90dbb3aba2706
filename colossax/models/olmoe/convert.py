"""OLMoE's names and layouts in Hugging Face files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting, settings_with
from colossax.models.expert_links import QWEN_LINKS, taught
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.olmoe.config import OLMoEConfig
from colossax.models.rope_settings import plain_rope, write_rope
from colossax.models.settings import first_eos

_LOSS = 0.01
_NORMS = {
    "layers/attn/q_norm/scale": "(heads head_dim)",
    "layers/attn/k_norm/scale": "(kv_heads head_dim)",
}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    renormalised = settings.get("norm_topk_prob") is True
    return {
        **plain_rope(settings),
        **first_eos(settings),
        **taught(settings, _LOSS, renormalised=renormalised),
    }


def _write(config: OLMoEConfig) -> dict[str, Any]:
    return {**write_rope(config.rope_theta), "eos_token_id": config.eos}


CONVERSION = Conversion(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=OLMoEConfig,
    settings=settings_with(
        SETTINGS,
        setting("norm_eps", "rms_norm_eps", default=1e-5),
        setting("experts", "num_experts", "num_local_experts", default=64),
        setting("choices", "num_experts_per_tok", default=8),
        setting("renormalise", "norm_topk_prob", default=False),
        setting("max_seq", "max_position_embeddings", default=4096),
        setting("balance_loss", "router_aux_loss_coef", default=_LOSS),
    ),
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "clip_qkv": (None,)},
    links=(
        *(
            dataclasses.replace(entry, layout=_NORMS.get(entry.ours[0], entry.layout))
            for entry in LINKS
        ),
        *QWEN_LINKS,
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
