"""GPT-J's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, link, setting
from colossax.models.gptj.config import GPTJConfig
from colossax.models.settings import first_eos, read_activation, write_activation

_LAYER = "transformer.h.{layer}"
_NORMS = {f"{_LAYER}.ln_1": "layers/shared_norm", "transformer.ln_f": "norm"}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    activation = read_activation(settings, "activation_function", "gelu_new")
    return {"activation": activation, **first_eos(settings)}


def _write(config: GPTJConfig) -> dict[str, Any]:
    return {
        "activation_function": write_activation(config.activation, "gelu_new"),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    config=GPTJConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "n_embd", "hidden_size"),
        setting("layers", "n_layer", "num_hidden_layers"),
        setting("heads", "n_head", "num_attention_heads"),
        setting("mlp", "n_inner", default=None),
        setting("max_seq", "n_positions", default=2048),
        setting("norm_eps", "layer_norm_epsilon", default=1e-5),
        setting("rope_dims", "rotary_dim", default=64),
        setting("tied", "tie_word_embeddings", default=False),
        setting("init_std", "initializer_range", default=0.02),
    ),
    links=(
        link("transformer.wte.weight", "vocab embed", "embed/table"),
        *(link(f"{theirs}.weight", "embed", f"{ours}/scale") for theirs, ours in _NORMS.items()),
        *(link(f"{theirs}.bias", "embed", f"{ours}/bias") for theirs, ours in _NORMS.items()),
        link(f"{_LAYER}.attn.q_proj.weight", "(heads head_dim) embed", "layers/attn/q/w"),
        link(f"{_LAYER}.attn.k_proj.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
        link(f"{_LAYER}.attn.v_proj.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
        link(f"{_LAYER}.attn.out_proj.weight", "embed (heads head_dim)", "layers/attn/o/w"),
        link(f"{_LAYER}.mlp.fc_in.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{_LAYER}.mlp.fc_in.bias", "mlp", "layers/mlp/up/b"),
        link(f"{_LAYER}.mlp.fc_out.weight", "embed mlp", "layers/mlp/down/w"),
        link(f"{_LAYER}.mlp.fc_out.bias", "embed", "layers/mlp/down/b"),
        link("lm_head.weight", "vocab embed", "head/w"),
        link("lm_head.bias", "vocab", "head_bias"),
    ),
    prefix="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    read=_read,
    write=_write,
)
