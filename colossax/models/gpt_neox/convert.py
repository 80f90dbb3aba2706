"""GPT-NeoX's names and layouts in Hugging Face files, which hold q, k and v head by head in one."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Positive
from colossax.models.conversion import Conversion, link, setting
from colossax.models.gpt_neox.config import GPTNeoXConfig
from colossax.models.rope_settings import read_rope, read_rope_dims, rope_share, write_rope
from colossax.models.settings import checked, first_eos, read_activation, write_activation
from colossax.nn import even_head_dim

_LAYER = "gpt_neox.layers.{layer}"
_QKV = [f"layers/attn/{name}" for name in "qkv"]
_FUSED = f"{_LAYER}.attention.query_key_value"
_NORMS = {
    f"{_LAYER}.input_layernorm": "layers/attn_norm",
    f"{_LAYER}.post_attention_layernorm": "layers/mlp_norm",
    "gpt_neox.final_layer_norm": "norm",
}
_RATE, _SHARE = "rotary_emb_base", "rotary_pct"


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    theta = checked(_RATE, settings.get(_RATE, 10_000.0), Positive)
    share = settings.get(_SHARE, 0.25)
    head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        **read_rope(settings, theta=theta, partial=True),
        "rope_dims": read_rope_dims(settings, head_dim, default=share),
        "activation": read_activation(settings, "hidden_act", "gelu"),
        **first_eos(settings),
    }


def _write(config: GPTNeoXConfig) -> dict[str, Any]:
    head_dim = even_head_dim(config.embed, config.heads)
    share = rope_share(config.rope_dims or head_dim, head_dim)
    return {
        **write_rope(config.rope_theta, config.rope_scaling, share=share),
        _RATE: config.rope_theta,
        _SHARE: share,
        "hidden_act": write_activation(config.activation),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    config=GPTNeoXConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "hidden_size"),
        setting("layers", "num_hidden_layers"),
        setting("heads", "num_attention_heads"),
        setting("mlp", "intermediate_size"),
        setting("max_seq", "max_position_embeddings", default=2048),
        setting("norm_eps", "layer_norm_eps", default=1e-5),
        setting("parallel", "use_parallel_residual", default=True),
        setting("attention_bias", "attention_bias", default=True),
        setting("tied", "tie_word_embeddings", default=False),
        setting("init_std", "initializer_range", default=0.02),
    ),
    links=(
        link("gpt_neox.embed_in.weight", "vocab embed", "embed/table"),
        *(link(f"{theirs}.weight", "embed", f"{ours}/scale") for theirs, ours in _NORMS.items()),
        *(link(f"{theirs}.bias", "embed", f"{ours}/bias") for theirs, ours in _NORMS.items()),
        link(f"{_FUSED}.weight", "(heads part head_dim) embed", *(f"{p}/w" for p in _QKV)),
        link(f"{_FUSED}.bias", "(heads part head_dim)", *(f"{p}/b" for p in _QKV)),
        link(f"{_LAYER}.attention.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"),
        link(f"{_LAYER}.attention.dense.bias", "embed", "layers/attn/o/b"),
        link(f"{_LAYER}.mlp.dense_h_to_4h.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{_LAYER}.mlp.dense_h_to_4h.bias", "mlp", "layers/mlp/up/b"),
        link(f"{_LAYER}.mlp.dense_4h_to_h.weight", "embed mlp", "layers/mlp/down/w"),
        link(f"{_LAYER}.mlp.dense_4h_to_h.bias", "embed", "layers/mlp/down/b"),
        link("embed_out.weight", "vocab embed", "head/w"),
    ),
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    read=_read,
    write=_write,
)
