"""Llama's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, link, setting
from colossax.models.llama.config import LlamaConfig
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

LINKS = (
    link("model.embed_tokens.weight", "vocab embed", "embed/table"),
    link("model.layers.{layer}.input_layernorm.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_ATTENTION}.q_proj.weight", "(heads head_dim) embed", "layers/attn/q/w"),
    link(f"{_ATTENTION}.q_proj.bias", "(heads head_dim)", "layers/attn/q/b"),
    link(f"{_ATTENTION}.k_proj.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
    link(f"{_ATTENTION}.k_proj.bias", "(kv_heads head_dim)", "layers/attn/k/b"),
    link(f"{_ATTENTION}.v_proj.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
    link(f"{_ATTENTION}.v_proj.bias", "(kv_heads head_dim)", "layers/attn/v/b"),
    link(f"{_ATTENTION}.q_norm.weight", "head_dim", "layers/attn/q_norm/scale"),
    link(f"{_ATTENTION}.k_norm.weight", "head_dim", "layers/attn/k_norm/scale"),
    link(f"{_ATTENTION}.o_proj.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_ATTENTION}.o_proj.bias", "embed", "layers/attn/o/b"),
    link("model.layers.{layer}.post_attention_layernorm.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_MLP}.gate_proj.weight", "mlp embed", "layers/mlp/gate/w"),
    link(f"{_MLP}.gate_proj.bias", "mlp", "layers/mlp/gate/b"),
    link(f"{_MLP}.up_proj.weight", "mlp embed", "layers/mlp/up/w"),
    link(f"{_MLP}.up_proj.bias", "mlp", "layers/mlp/up/b"),
    link(f"{_MLP}.down_proj.weight", "embed mlp", "layers/mlp/down/w"),
    link(f"{_MLP}.down_proj.bias", "embed", "layers/mlp/down/b"),
    link("model.norm.weight", "embed", "norm/scale"),
    link("lm_head.weight", "vocab embed", "head/w"),
)
"""Also those of Mistral, Qwen 2 and Qwen 3."""

SETTINGS = (
    setting("vocab", "vocab_size"),
    setting("embed", "hidden_size"),
    setting("layers", "num_hidden_layers"),
    setting("heads", "num_attention_heads"),
    setting("kv_heads", "num_key_value_heads", default=lambda s: s["num_attention_heads"]),
    setting("mlp", "intermediate_size"),
    setting("norm_eps", "rms_norm_eps", default=1e-6),
    setting("tied", "tie_word_embeddings", default=False),
    setting("init_std", "initializer_range", default=0.02),
)
"""Those every family of this kind has; more in each family's own."""

IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings), **first_eos(settings)}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    settings=(
        *SETTINGS,
        setting("head_dim", "head_dim", default=None),
        setting("max_seq", "max_position_embeddings", default=2048),
        setting("attention_bias", "attention_bias", default=False),
        setting("mlp_bias", "mlp_bias", default=False),
    ),
    fixed={"hidden_act": ("silu",)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
