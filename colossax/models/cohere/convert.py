"""Command R's names and layouts in Hugging Face files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.models.cohere.config import CohereConfig
from colossax.models.conversion import Conversion, Link, setting, settings_with
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings, theta=500_000.0), **first_eos(settings)}


def _write(config: CohereConfig) -> dict[str, Any]:
    return {**write_rope(config.rope_theta, config.rope_scaling), "eos_token_id": config.eos}


def _changed(entry: Link) -> Link:
    """One norm for both sublayers; norms of queries and keys have scales of each head."""
    if entry.ours == ("layers/attn_norm/scale",):
        return dataclasses.replace(entry, ours=("layers/shared_norm/scale",))
    heads = {"q_norm": "heads head_dim", "k_norm": "kv_heads head_dim"}
    layout = next((own for name, own in heads.items() if name in entry.foreign), entry.layout)
    return dataclasses.replace(entry, layout=layout)


CONVERSION = Conversion(
    model_type="cohere",
    architecture="CohereForCausalLM",
    config=CohereConfig,
    settings=settings_with(
        SETTINGS,
        setting("tied", "tie_word_embeddings", default=True),
        setting("norm_eps", "layer_norm_eps", default=1e-5),
        setting("max_seq", "max_position_embeddings", default=8192),
        setting("logit_scale", "logit_scale", default=0.0625),
        setting("attention_bias", "attention_bias", default=False),
        setting("qk_norm", "use_qk_norm", default=False),
    ),
    fixed={"hidden_act": ("silu",)},
    links=tuple(_changed(one) for one in LINKS if "post_attention_layernorm" not in one.foreign),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
