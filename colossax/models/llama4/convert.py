"""Llama 4's names and layouts in Hugging Face files, text only."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Positive
from colossax.errors import InputError
from colossax.models.conversion import Conversion, link, setting, settings_with
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.llama4.config import Llama4Config
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import FULL, checked, every_full, first_eos, per_layer, write_kinds
from colossax.nn import QueryGrowth

_MLP = "model.layers.{layer}.feed_forward"
_OURS = "layers/mlp"
_CHUNKED = "chunked_attention"
_KINDS = f"a layer without rope and with {FULL} in each so many-th place"

_LINKS = (
    link(f"{_MLP}.router.weight", "scores embed", f"{_OURS}/router/w"),
    link(
        f"{_MLP}.experts.gate_up_proj",
        "experts expert_embed (part expert_mlp)",
        f"{_OURS}/gate",
        f"{_OURS}/up",
    ),
    link(f"{_MLP}.experts.down_proj", "experts expert_mlp expert_embed", f"{_OURS}/down"),
    link(f"{_MLP}.shared_expert.gate_proj.weight", "mlp embed", f"{_OURS}/shared/gate/w"),
    link(f"{_MLP}.shared_expert.up_proj.weight", "mlp embed", f"{_OURS}/shared/up/w"),
    link(f"{_MLP}.shared_expert.down_proj.weight", "embed mlp", f"{_OURS}/shared/down/w"),
)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full_every": _full_every(settings),
        "query_growth": _growth(settings),
        **_mixed(settings),
        **read_rope({"rope_theta": 500_000.0, **settings}, allowed=("default", "llama3")),
        **first_eos(settings),
    }


def _full_every(settings: Mapping[str, Any]) -> int:
    """Of which so many-th layers have no rope; they must be those that see all keys."""
    turned = per_layer(settings, "no_rope_layers", (0, 1))
    if turned is None:
        interval = settings.get("no_rope_layer_interval", 4)
        every = checked("no_rope_layer_interval", interval, Count)
    else:
        every = every_full("no_rope_layers", [not one for one in turned], _KINDS)
    kinds = per_layer(settings, "layer_types", (_CHUNKED, FULL))
    if kinds is not None:
        found = [every > 0 and (at + 1) % every == 0 for at in range(len(kinds))]
        if [kind == FULL for kind in kinds] != found:
            raise InputError(
                "config.json: layer_types apart from no_rope_layers are not supported; only"
                f" {_KINDS} is"
            )
    return every


def _growth(settings: Mapping[str, Any]) -> QueryGrowth | None:
    grows = settings.get("attn_temperature_tuning", True)
    # In older files a number that is a truth value.
    if not checked("attn_temperature_tuning", bool(grows) if grows in (0, 1, 4) else grows, bool):
        return None
    return QueryGrowth(
        scale=checked("attn_scale", settings.get("attn_scale", 0.1), Positive),
        step=checked("floor_scale", settings.get("floor_scale", 8192), Count),
    )


def _mixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    every = checked(
        "interleave_moe_layer_step", settings.get("interleave_moe_layer_step", 1), Count
    )
    sparse = checked("moe_layers", settings.get("moe_layers"), list | None)
    layers = checked("num_hidden_layers", settings.get("num_hidden_layers"), Count)
    if sparse is not None and sparse != list(range(every - 1, layers, every)):
        raise InputError(
            f"config.json: moe_layers = {sparse[:5]!r} and more, apart from"
            f" interleave_moe_layer_step = {every}, is not supported; only those of that step are"
        )
    return {"every": every}


def _write(config: Llama4Config) -> dict[str, Any]:
    full, growth = config.decoder().sees_all, config.query_growth
    settings = {
        **write_rope(config.rope_theta, config.rope_scaling),
        "layer_types": write_kinds(full, _CHUNKED),
        "no_rope_layers": [0 if one else 1 for one in full],
        "interleave_moe_layer_step": config.every,
        "moe_layers": list(range(config.every - 1, config.layers, config.every)),
        "attn_temperature_tuning": growth is not None,
        "eos_token_id": config.eos,
    }
    if growth is not None:
        settings |= {"attn_scale": growth.scale, "floor_scale": growth.step}
    return settings


CONVERSION = Conversion(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    config=Llama4Config,
    settings=settings_with(
        SETTINGS,
        setting("norm_eps", "rms_norm_eps", default=1e-5),
        setting("dense_mlp", "intermediate_size_mlp", default=16_384),
        setting("head_dim", "head_dim", default=128),
        setting("max_seq", "max_position_embeddings", default=131_072),
        setting("experts", "num_local_experts", default=16),
        setting("choices", "num_experts_per_tok", default=1),
        setting("balance_loss", "router_aux_loss_coef", default=0.001),
        setting("chunk", "attention_chunk_size", default=8192),
        setting("qk_unit", "use_qk_norm", default=True),
        setting("attention_bias", "attention_bias", default=False),
    ),
    fixed={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    links=(
        *(
            dataclasses.replace(entry, foreign=entry.foreign.replace(".mlp.", ".feed_forward."))
            for entry in LINKS
        ),
        *_LINKS,
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
