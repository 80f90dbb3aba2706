"""Mixtral's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting, settings_with
from colossax.models.expert_links import expert_links, taught
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.mixtral.config import MixtralConfig
from colossax.models.rope_settings import plain_rope, write_rope
from colossax.models.settings import first_eos

_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
_LOSS = 0.001


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **plain_rope({"rope_theta": 1_000_000.0, **settings}),
        **first_eos(settings),
        **taught(settings, _LOSS, renormalised=True),
    }


def _write(config: MixtralConfig) -> dict[str, Any]:
    return {**write_rope(config.rope_theta), "eos_token_id": config.eos}


CONVERSION = Conversion(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=MixtralConfig,
    settings=settings_with(
        SETTINGS,
        setting("norm_eps", "rms_norm_eps", default=1e-5),
        setting("head_dim", "head_dim", default=None),
        setting("max_seq", "max_position_embeddings", default=131_072),
        setting("window", "sliding_window", default=None),
        setting("experts", "num_local_experts", default=8),
        setting("choices", "num_experts_per_tok", default=2),
        setting("balance_loss", "router_aux_loss_coef", default=_LOSS),
    ),
    fixed={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    links=(
        *LINKS,
        *expert_links("model.layers.{layer}.block_sparse_moe", _NAMES, "gate"),
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
