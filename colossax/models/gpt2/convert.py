"""GPT-2's names and layouts in Hugging Face files, which store matrices as [in, out]."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import CLASSIFIER_FORMS, Conversion, link, setting
from colossax.models.gpt2.config import GPT2Config
from colossax.models.settings import first_eos

_H = "transformer.h.{layer}"
_QKV = ("layers/attn/q", "layers/attn/k", "layers/attn/v")

LINKS = (
    link("transformer.wte.weight", "vocab embed", "embed/table"),
    link("transformer.wpe.weight", "positions embed", "positions/table"),
    link(f"{_H}.ln_1.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_H}.ln_1.bias", "embed", "layers/attn_norm/bias"),
    link(f"{_H}.attn.c_attn.weight", "embed (part heads head_dim)", *(f"{p}/w" for p in _QKV)),
    link(f"{_H}.attn.c_attn.bias", "(part heads head_dim)", *(f"{p}/b" for p in _QKV)),
    link(f"{_H}.attn.c_proj.weight", "(heads head_dim) embed", "layers/attn/o/w"),
    link(f"{_H}.attn.c_proj.bias", "embed", "layers/attn/o/b"),
    link(f"{_H}.ln_2.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_H}.ln_2.bias", "embed", "layers/mlp_norm/bias"),
    link(f"{_H}.mlp.c_fc.weight", "embed mlp", "layers/mlp/up/w"),
    link(f"{_H}.mlp.c_fc.bias", "mlp", "layers/mlp/up/b"),
    link(f"{_H}.mlp.c_proj.weight", "mlp embed", "layers/mlp/down/w"),
    link(f"{_H}.mlp.c_proj.bias", "embed", "layers/mlp/down/b"),
    link("transformer.ln_f.weight", "embed", "norm/scale"),
    link("transformer.ln_f.bias", "embed", "norm/bias"),
    link("lm_head.weight", "vocab embed", "head/w"),
)


def _mlp(settings: Mapping[str, Any]) -> int:
    return 4 * settings.get("n_embd", settings.get("hidden_size", 0))


CONVERSION = Conversion(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config=GPT2Config,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "n_embd", "hidden_size"),
        setting("layers", "n_layer", "num_hidden_layers"),
        setting("heads", "n_head", "num_attention_heads"),
        setting("mlp", "n_inner", default=_mlp),
        setting("max_seq", "n_positions", "max_position_embeddings", default=1024),
        setting("norm_eps", "layer_norm_epsilon", default=1e-5),
        setting("tied", "tie_word_embeddings", default=True),
        setting("init_std", "initializer_range", default=0.02),
    ),
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    forms=CLASSIFIER_FORMS,
    links=LINKS,
    prefix="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    read=first_eos,
    write=lambda config: {"eos_token_id": config.eos},
)
