"""OPT's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.conversion import Conversion, link, setting
from colossax.models.opt.config import OPTConfig
from colossax.models.settings import first_eos

_LAYER = "model.decoder.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_NORM_EPS = 1e-5

LINKS = (
    link("model.decoder.embed_tokens.weight", "vocab embed", "embed/table"),
    link("model.decoder.project_in.weight", "embed width", "into/w"),
    link("model.decoder.embed_positions.weight", "positions embed", "positions/table"),
    link(f"{_LAYER}.self_attn_layer_norm.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_LAYER}.self_attn_layer_norm.bias", "embed", "layers/attn_norm/bias"),
    link(f"{_ATTENTION}.q_proj.weight", "(heads head_dim) embed", "layers/attn/q/w"),
    link(f"{_ATTENTION}.q_proj.bias", "(heads head_dim)", "layers/attn/q/b"),
    link(f"{_ATTENTION}.k_proj.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
    link(f"{_ATTENTION}.k_proj.bias", "(kv_heads head_dim)", "layers/attn/k/b"),
    link(f"{_ATTENTION}.v_proj.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
    link(f"{_ATTENTION}.v_proj.bias", "(kv_heads head_dim)", "layers/attn/v/b"),
    link(f"{_ATTENTION}.out_proj.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_ATTENTION}.out_proj.bias", "embed", "layers/attn/o/b"),
    link(f"{_LAYER}.final_layer_norm.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_LAYER}.final_layer_norm.bias", "embed", "layers/mlp_norm/bias"),
    link(f"{_LAYER}.fc1.weight", "mlp embed", "layers/mlp/up/w"),
    link(f"{_LAYER}.fc1.bias", "mlp", "layers/mlp/up/b"),
    link(f"{_LAYER}.fc2.weight", "embed mlp", "layers/mlp/down/w"),
    link(f"{_LAYER}.fc2.bias", "embed", "layers/mlp/down/b"),
    link(f"{_LAYER}.self_attn_layer_norm.weight", "embed", "layers/attn_sum_norm/scale"),
    link(f"{_LAYER}.self_attn_layer_norm.bias", "embed", "layers/attn_sum_norm/bias"),
    link(f"{_LAYER}.final_layer_norm.weight", "embed", "layers/mlp_sum_norm/scale"),
    link(f"{_LAYER}.final_layer_norm.bias", "embed", "layers/mlp_sum_norm/bias"),
    link("model.decoder.final_layer_norm.weight", "embed", "norm/scale"),
    link("model.decoder.final_layer_norm.bias", "embed", "norm/bias"),
    link("model.decoder.project_out.weight", "width embed", "out_of/w"),
    link("lm_head.weight", "vocab embed", "head/w"),
)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    width = settings.get("word_embed_proj_dim")
    return {
        "norm_eps": _NORM_EPS,
        "token_width": None if width == settings["hidden_size"] else width,
        **first_eos(settings),
    }


def _write(config: OPTConfig) -> dict[str, Any]:
    if config.norm_eps != _NORM_EPS:
        raise InputError(
            f"opt config: norm_eps = {config.norm_eps} cannot be exported, the format has no place"
            f" for it; only {_NORM_EPS} can"
        )
    width = config.token_width or config.embed
    return {"word_embed_proj_dim": width, "eos_token_id": config.eos}


CONVERSION = Conversion(
    model_type="opt",
    architecture="OPTForCausalLM",
    config=OPTConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "hidden_size"),
        setting("layers", "num_hidden_layers"),
        setting("heads", "num_attention_heads"),
        setting("mlp", "ffn_dim"),
        setting("max_seq", "max_position_embeddings", default=2048),
        setting("norm_first", "do_layer_norm_before", default=True),
        setting("tied", "tie_word_embeddings", default=True),
        setting("init_std", "init_std", default=0.02),
    ),
    fixed={
        "activation_function": ("relu",),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    links=LINKS,
    prefix="model.",
    read=_read,
    write=_write,
)
