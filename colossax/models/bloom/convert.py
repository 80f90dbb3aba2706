"""BLOOM's names and layouts in Hugging Face files, which hold q, k and v head by head in one."""

from colossax.models.bloom.config import BloomConfig
from colossax.models.conversion import CLASSIFIER_FORMS, Conversion, link, setting
from colossax.models.settings import first_eos

_H = "transformer.h.{layer}"
_QKV = ("layers/attn/q", "layers/attn/k", "layers/attn/v")
_FUSED = f"{_H}.self_attention.query_key_value"

LINKS = (
    link("transformer.word_embeddings.weight", "vocab embed", "embed/table"),
    link("transformer.word_embeddings_layernorm.weight", "embed", "embed_norm/scale"),
    link("transformer.word_embeddings_layernorm.bias", "embed", "embed_norm/bias"),
    link(f"{_H}.input_layernorm.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_H}.input_layernorm.bias", "embed", "layers/attn_norm/bias"),
    link(f"{_FUSED}.weight", "(heads part head_dim) embed", *(f"{p}/w" for p in _QKV)),
    link(f"{_FUSED}.bias", "(heads part head_dim)", *(f"{p}/b" for p in _QKV)),
    link(f"{_H}.self_attention.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_H}.self_attention.dense.bias", "embed", "layers/attn/o/b"),
    link(f"{_H}.post_attention_layernorm.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_H}.post_attention_layernorm.bias", "embed", "layers/mlp_norm/bias"),
    link(f"{_H}.mlp.dense_h_to_4h.weight", "mlp embed", "layers/mlp/up/w"),
    link(f"{_H}.mlp.dense_h_to_4h.bias", "mlp", "layers/mlp/up/b"),
    link(f"{_H}.mlp.dense_4h_to_h.weight", "embed mlp", "layers/mlp/down/w"),
    link(f"{_H}.mlp.dense_4h_to_h.bias", "embed", "layers/mlp/down/b"),
    link("transformer.ln_f.weight", "embed", "norm/scale"),
    link("transformer.ln_f.bias", "embed", "norm/bias"),
    link("lm_head.weight", "vocab embed", "head/w"),
)

CONVERSION = Conversion(
    model_type="bloom",
    architecture="BloomForCausalLM",
    config=BloomConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "hidden_size", "n_embed"),
        setting("layers", "n_layer", "num_hidden_layers"),
        setting("heads", "n_head", "num_attention_heads"),
        setting("max_seq", "seq_length", default=2048),
        setting("norm_eps", "layer_norm_epsilon", default=1e-5),
        setting("tied", "tie_word_embeddings", default=True),
        setting("init_std", "initializer_range", default=0.02),
    ),
    fixed={"apply_residual_connection_post_layernorm": (False,)},
    forms=CLASSIFIER_FORMS,
    links=LINKS,
    prefix="transformer.",
    read=first_eos,
    write=lambda config: {"eos_token_id": config.eos},
)
