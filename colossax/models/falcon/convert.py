"""Falcon's names and layouts in Hugging Face files, which hold q, k and v in one in three ways."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.conversion import Conversion, Link, link, setting
from colossax.models.falcon.config import FalconConfig
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos

_LAYER = "transformer.h.{layer}"
_FUSED = f"{_LAYER}.self_attention.query_key_value"
_NORMS = (
    (f"{_LAYER}.input_layernorm", "layers/shared_norm"),
    (f"{_LAYER}.input_layernorm", "layers/attn_norm"),
    (f"{_LAYER}.post_attention_layernorm", "layers/mlp_norm"),
)
_NORMS_APART = ((f"{_LAYER}.ln_attn", "layers/attn_norm"), (f"{_LAYER}.ln_mlp", "layers/mlp_norm"))


def _both(pairs: tuple[tuple[str, str], ...]) -> tuple[Link, ...]:
    parts = {"weight": "scale", "bias": "bias"}
    return tuple(
        link(f"{theirs}.{part}", "embed", f"{ours}/{own}")
        for theirs, ours in pairs
        for part, own in parts.items()
    )


def _links(config: FalconConfig) -> tuple[Link, ...]:
    heads = "heads|kv_heads|kv_heads"
    if config.grouped:
        heads = "kv_heads heads/kv_heads|1|1"
    elif config.kv_heads == config.heads:
        heads = "heads part"
    q, k, v = (f"layers/attn/{name}" for name in "qkv")
    apart = config.parallel and not config.shared_norm
    return (
        *LINKS,
        *_both(_NORMS_APART if apart else _NORMS),
        link(f"{_FUSED}.weight", f"({heads} head_dim) embed", f"{q}/w", f"{k}/w", f"{v}/w"),
        link(f"{_FUSED}.bias", f"({heads} head_dim)", f"{q}/b", f"{k}/b", f"{v}/b"),
    )


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    heads = settings.get("num_attention_heads", settings.get("n_head"))
    grouped = bool(settings.get("new_decoder_architecture"))
    norms = settings.get("num_ln_in_parallel_attn")
    norms = 2 if norms is None and grouped else norms
    parallel = bool(settings.get("parallel_attn", True))
    if (grouped and not parallel) or (norms == 2 and not grouped):
        raise InputError(
            "config.json: falcon with new_decoder_architecture ="
            f" {grouped}, parallel_attn = {parallel} and num_ln_in_parallel_attn = {norms!r} is not"
            " supported; only two norms with the new architecture, side by side, are"
        )
    kv_heads = 1 if settings.get("multi_query", True) else heads
    if grouped:
        kv_heads = settings.get("num_kv_heads") or heads
    return {
        **read_rope(settings),
        "kv_heads": kv_heads,
        "parallel": parallel,
        "shared_norm": parallel and norms != 2,
        "grouped": grouped,
        **first_eos(settings),
    }


def _write(config: FalconConfig) -> dict[str, Any]:
    if not config.grouped and config.kv_heads not in (1, config.heads):
        raise InputError(
            f"falcon config: kv_heads = {config.kv_heads} cannot be exported without grouped; give"
            f" grouped, or 1 or {config.heads} kv heads"
        )
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "num_kv_heads": config.kv_heads if config.grouped else config.heads,
        "multi_query": config.grouped or config.kv_heads == 1,
        "parallel_attn": config.parallel,
        "new_decoder_architecture": config.grouped,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if config.grouped else None,
        "eos_token_id": config.eos,
    }


LINKS = (
    link("transformer.word_embeddings.weight", "vocab embed", "embed/table"),
    link(f"{_LAYER}.self_attention.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_LAYER}.self_attention.dense.bias", "embed", "layers/attn/o/b"),
    link(f"{_LAYER}.mlp.dense_h_to_4h.weight", "mlp embed", "layers/mlp/up/w"),
    link(f"{_LAYER}.mlp.dense_h_to_4h.bias", "mlp", "layers/mlp/up/b"),
    link(f"{_LAYER}.mlp.dense_4h_to_h.weight", "embed mlp", "layers/mlp/down/w"),
    link(f"{_LAYER}.mlp.dense_4h_to_h.bias", "embed", "layers/mlp/down/b"),
    *_both((("transformer.ln_f", "norm"),)),
    link("lm_head.weight", "vocab embed", "head/w"),
)
"""Those of every form."""

CONVERSION = Conversion(
    model_type="falcon",
    architecture="FalconForCausalLM",
    config=FalconConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "hidden_size", "n_embed"),
        setting("layers", "num_hidden_layers", "n_layer"),
        setting("heads", "num_attention_heads", "n_head"),
        setting("mlp", "ffn_hidden_size", default=None),
        setting("max_seq", "max_position_embeddings", default=2048),
        setting("norm_eps", "layer_norm_epsilon", default=1e-5),
        setting("alibi", "alibi", default=False),
        setting("bias", "bias", default=False),
        setting("tied", "tie_word_embeddings", default=True),
        setting("init_std", "initializer_range", default=0.02),
    ),
    fixed={"activation": ("gelu",)},
    links=LINKS,
    links_of=_links,
    prefix="transformer.",
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    read=_read,
    write=_write,
)
