"""gpt-oss's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.conversion import Conversion, link, setting, settings_with
from colossax.models.expert_links import taught
from colossax.models.gpt_oss.config import GPTOSSConfig
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import (
    FULL,
    LOCAL,
    checked,
    every_full,
    first_eos,
    per_layer,
    write_kinds,
)

_MLP = "model.layers.{layer}.mlp"
_OURS = "layers/mlp"
_LOSS = 0.001

_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""Of a file that says nothing of scaling."""

_LINKS = (
    link("model.layers.{layer}.self_attn.sinks", "heads", "layers/attn/sinks"),
    link(f"{_MLP}.router.weight", "scores embed", f"{_OURS}/router/w"),
    link(f"{_MLP}.router.bias", "scores", f"{_OURS}/router/b"),
    link(
        f"{_MLP}.experts.gate_up_proj",
        "experts expert_embed (expert_mlp part)",
        f"{_OURS}/gate",
        f"{_OURS}/up",
    ),
    link(
        f"{_MLP}.experts.gate_up_proj_bias",
        "experts (expert_mlp part)",
        f"{_OURS}/gate_bias",
        f"{_OURS}/up_bias",
    ),
    link(f"{_MLP}.experts.down_proj", "experts expert_mlp expert_embed", f"{_OURS}/down"),
    link(f"{_MLP}.experts.down_proj_bias", "experts expert_embed", f"{_OURS}/down_bias"),
)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    _check_packing(settings)
    kinds = per_layer(settings, "layer_types", (LOCAL, FULL))
    full_every = 2
    if kinds is not None:
        remedy = f"{FULL} in each so many-th layer and {LOCAL} in the others"
        full_every = every_full("layer_types", [kind == FULL for kind in kinds], remedy)
    return {
        "full_every": full_every,
        **_rope(settings),
        **first_eos(settings),
        **taught(settings, _LOSS, renormalised=True),
    }


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    said = {"rope_theta": 150_000.0, **settings}
    if said.get("rope_parameters") is None:
        # Older readers take null for no scaling, newer ones for the same as nothing.
        if said.get("rope_scaling", _SCALING) is None:
            raise InputError(
                "config.json: rope_scaling is null, which readers take for no scaling or for"
                " YaRN's; say which by rope_parameters, of rope_type 'default' or 'yarn'"
            )
        said = {"rope_scaling": _SCALING, **said}
    return read_rope(said, allowed=("default", "yarn"))


def _check_packing(settings: Mapping[str, Any]) -> None:
    packing = checked("quantization_config", settings.get("quantization_config"), dict | None) or {}
    method = packing.get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise InputError(
            f"config.json: quantization_config with quant_method = {method!r} is not supported;"
            " only 'mxfp4' is"
        )


def _write(config: GPTOSSConfig) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "layer_types": write_kinds(config.decoder().sees_all),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    config=GPTOSSConfig,
    settings=settings_with(
        SETTINGS,
        setting("norm_eps", "rms_norm_eps", default=1e-5),
        setting("head_dim", "head_dim", default=64),
        setting("max_seq", "max_position_embeddings", default=131_072),
        setting("window", "sliding_window", default=128),
        setting("experts", "num_local_experts", "num_experts", default=128),
        setting("choices", "num_experts_per_tok", default=4),
        setting("balance_loss", "router_aux_loss_coef", default=_LOSS),
        setting("attention_bias", "attention_bias", default=True),
    ),
    fixed={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    links=(*LINKS, *_LINKS),
    ignored=IGNORED,
    read=_read,
    write=_write,
    packed=True,
)
