"""StarCoder2's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, link, setting, settings_with
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos
from colossax.models.starcoder2.config import StarCoder2Config

_LAYER = "model.layers.{layer}"
_NORMS = {
    f"{_LAYER}.input_layernorm": "layers/attn_norm",
    f"{_LAYER}.post_attention_layernorm": "layers/mlp_norm",
    "model.norm": "norm",
}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings), **first_eos(settings)}


def _write(config: StarCoder2Config) -> dict[str, Any]:
    return {**write_rope(config.rope_theta, config.rope_scaling), "eos_token_id": config.eos}


CONVERSION = Conversion(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    config=StarCoder2Config,
    settings=settings_with(
        SETTINGS,
        setting("tied", "tie_word_embeddings", default=True),
        setting("norm_eps", "norm_epsilon", default=1e-5),
        setting("max_seq", "max_position_embeddings", default=4096),
        setting("window", "sliding_window", default=None),
        setting("bias", "use_bias", default=True),
    ),
    fixed={"hidden_act": ("gelu_pytorch_tanh",)},
    links=(
        *(entry for entry in LINKS if ".mlp." not in entry.foreign),
        *(link(f"{theirs}.bias", "embed", f"{ours}/bias") for theirs, ours in _NORMS.items()),
        link(f"{_LAYER}.mlp.c_fc.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{_LAYER}.mlp.c_fc.bias", "mlp", "layers/mlp/up/b"),
        link(f"{_LAYER}.mlp.c_proj.weight", "embed mlp", "layers/mlp/down/w"),
        link(f"{_LAYER}.mlp.c_proj.bias", "embed", "layers/mlp/down/b"),
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
