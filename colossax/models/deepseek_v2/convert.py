"""DeepSeek V2's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.conversion import Conversion, link, setting
from colossax.models.deepseek_v2.config import DeepSeekConfig, DeepSeekV2Config
from colossax.models.expert_links import expert_links
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import checked, first_eos

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"
_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_METHODS = ("greedy", "group_limited_greedy")

LATENT_LINKS = (
    *(one for one in LINKS if "self_attn" not in one.foreign or "o_proj" in one.foreign),
    link(f"{_ATTENTION}.q_proj.weight", "(heads head_dim) embed", "layers/attn/q/w"),
    link(f"{_ATTENTION}.q_a_proj.weight", "q_latent embed", "layers/attn/q_down/w"),
    link(f"{_ATTENTION}.q_a_layernorm.weight", "q_latent", "layers/attn/q_norm/scale"),
    link(f"{_ATTENTION}.q_b_proj.weight", "(heads head_dim) q_latent", "layers/attn/q_up/w"),
    link(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "kv_latent embed", "layers/attn/kv_down/w"),
    link(f"{_ATTENTION}.kv_a_layernorm.weight", "kv_latent", "layers/attn/kv_norm/scale"),
    link(f"{_ATTENTION}.kv_b_proj.weight", "(heads head_dim) kv_latent", "layers/attn/kv_up/w"),
    *expert_links(_MLP, _NAMES, "gate"),
    link(f"{_MLP}.shared_experts.gate_proj.weight", "mlp embed", "layers/mlp/shared/gate/w"),
    link(f"{_MLP}.shared_experts.up_proj.weight", "mlp embed", "layers/mlp/shared/up/w"),
    link(f"{_MLP}.shared_experts.down_proj.weight", "embed mlp", "layers/mlp/shared/down/w"),
)
"""Also those of DeepSeek V3."""

LATENT_SETTINGS = (
    *(one for one in SETTINGS if one.ours != "kv_heads"),
    setting("expert_mlp", "moe_intermediate_size"),
    setting("experts", "n_routed_experts"),
    setting("choices", "num_experts_per_tok"),
    setting("shared", "n_shared_experts"),
    setting("kv_rank", "kv_lora_rank"),
    setting("q_rank", "q_lora_rank", default=1536),
    setting("nope_dim", "qk_nope_head_dim"),
    setting("rope_dim", "qk_rope_head_dim"),
    setting("v_dim", "v_head_dim"),
)
"""Likewise."""

LATENT_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
}
"""Likewise."""


def read_latent(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What both families read.

    Raises:
        InputError: Weights are quantised, or heads share keys.
    """
    if settings.get("quantization_config") is not None:
        raise InputError(
            "config.json: weights quantised as quantization_config says are not supported; convert"
            " them to bfloat16 and remove quantization_config"
        )
    heads, kv_heads = (settings.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if kv_heads not in (None, heads):
        raise InputError(
            f"config.json: num_key_value_heads = {kv_heads!r} is not supported; only as many as"
            f" num_attention_heads, {heads!r}, are"
        )
    return {**read_rope(settings, allowed=("default", "yarn")), **first_eos(settings)}


def write_latent(config: DeepSeekConfig) -> dict[str, Any]:
    """What both families write."""
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "num_key_value_heads": config.heads,
        "eos_token_id": config.eos,
    }


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    method = settings.get("topk_method", "greedy")
    if method not in _METHODS:
        raise InputError(
            f"config.json: topk_method = {method!r} is not supported; only"
            f" {' or '.join(map(repr, _METHODS))} is"
        )
    groups = ("n_group", "topk_group") if method == "group_limited_greedy" else ()
    ours = dict(zip(("groups", "kept_groups"), groups, strict=False))
    found = {name: checked(key, settings.get(key), int) for name, key in ours.items()}
    return {**read_latent(settings), **found}


def _write(config: DeepSeekV2Config) -> dict[str, Any]:
    return {
        **write_latent(config),
        "topk_method": _METHODS[bool(config.groups)],
        "n_group": config.groups or None,
        "topk_group": config.kept_groups or None,
    }


CONVERSION = Conversion(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=DeepSeekV2Config,
    settings=(
        *LATENT_SETTINGS,
        setting("first_dense", "first_k_dense_replace", default=0),
        setting("scale", "routed_scaling_factor", default=1.0),
        setting("max_seq", "max_position_embeddings", default=2048),
        setting("balance_loss", "aux_loss_alpha", default=0.001),
    ),
    fixed={
        **LATENT_FIXED,
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "seq_aux": (True,),
    },
    links=LATENT_LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
