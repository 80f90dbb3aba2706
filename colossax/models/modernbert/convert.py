"""ModernBERT's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError
from colossax.models.bert.convert import transform_links
from colossax.models.conversion import Conversion, link, setting
from colossax.models.modernbert.config import ModernBERTConfig
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import (
    FULL,
    LOCAL,
    ROWS,
    TOKENS,
    Form,
    checked,
    every_full,
    first_eos,
    per_layer,
    read_activation,
    write_activation,
    write_kinds,
)
from colossax.nn.config import HeadConfig, TransformConfig

_LAYER = "model.layers.{layer}"
_QKV = ("layers/attn/q", "layers/attn/k", "layers/attn/v")
_POOLS = {"cls": "first", "mean": "mean"}

LINKS = (
    link("model.embeddings.tok_embeddings.weight", "vocab embed", "embed/table"),
    link("model.embeddings.norm.weight", "embed", "embed_norm/scale"),
    link("model.embeddings.norm.bias", "embed", "embed_norm/bias"),
    link(f"{_LAYER}.attn_norm.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_LAYER}.attn_norm.bias", "embed", "layers/attn_norm/bias"),
    link(f"{_LAYER}.attn.Wqkv.weight", "(part heads head_dim) embed", *(f"{p}/w" for p in _QKV)),
    link(f"{_LAYER}.attn.Wqkv.bias", "(part heads head_dim)", *(f"{p}/b" for p in _QKV)),
    link(f"{_LAYER}.attn.Wo.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_LAYER}.attn.Wo.bias", "embed", "layers/attn/o/b"),
    link(f"{_LAYER}.mlp_norm.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_LAYER}.mlp_norm.bias", "embed", "layers/mlp_norm/bias"),
    link(f"{_LAYER}.mlp.Wi.weight", "(part mlp) embed", "layers/mlp/gate/w", "layers/mlp/up/w"),
    link(f"{_LAYER}.mlp.Wi.bias", "(part mlp)", "layers/mlp/gate/b", "layers/mlp/up/b"),
    link(f"{_LAYER}.mlp.Wo.weight", "embed mlp", "layers/mlp/down/w"),
    link(f"{_LAYER}.mlp.Wo.bias", "embed", "layers/mlp/down/b"),
    link("model.final_norm.weight", "embed", "norm/scale"),
    link("model.final_norm.bias", "embed", "norm/bias"),
    *transform_links("head.dense", "head.norm"),
    link("decoder.weight", "vocab embed", "head/w"),
    link("decoder.bias", "vocab", "head_bias"),
)

_CLASSES = (
    *transform_links("head.dense", "head.norm", "answers/transform"),
    link("classifier.weight", "outputs embed", "answers/map/w"),
    link("classifier.bias", "outputs", "answers/map/b"),
)


def _transform(settings: Mapping[str, Any]) -> TransformConfig:
    return TransformConfig(
        activation=read_activation(settings, "classifier_activation", "gelu"),
        bias=checked("classifier_bias", settings.get("classifier_bias", False), bool),
    )


def _of_rows(settings: Mapping[str, Any], outputs: int) -> HeadConfig:
    pool = settings.get("classifier_pooling", "cls")
    if pool not in _POOLS:
        raise InputError(
            f"config.json: modernbert with classifier_pooling = {pool!r} is not supported; only"
            f" {' or '.join(map(repr, _POOLS))} is"
        )
    return HeadConfig(outputs=outputs, pool=_POOLS[pool], transform=_transform(settings))


def _thetas(settings: Mapping[str, Any]) -> list[float]:
    """Bases of both ropes, which newer files hold by the type of layer."""
    rope = checked("rope_parameters", settings.get("rope_parameters"), dict | None) or {}
    usual = {
        FULL: settings.get("global_rope_theta", 160_000.0),
        LOCAL: settings.get("local_rope_theta", 10_000.0),
    }
    return [
        read_rope(
            {**settings, "rope_parameters": rope.get(kind)}, theta=theta, allowed=("default",)
        )["rope_theta"]
        for kind, theta in usual.items()
    ]


def _full_every(settings: Mapping[str, Any]) -> int:
    kinds = per_layer(settings, "layer_types", (LOCAL, FULL))
    if kinds is None:
        return settings.get("global_attn_every_n_layers", 3)
    remedy = f"{FULL!r} in the first layer and each so many-th behind it"
    full = [kind == FULL for kind in kinds]
    if not full[0]:
        raise InputError(
            f"config.json: layer_types with {LOCAL!r} first are not supported; only {remedy} is"
        )
    return every_full("layer_types", full[1:], remedy) or len(full)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    full, local = _thetas(settings)
    return {
        "rope_theta": full,
        "local_theta": local,
        "full_every": _full_every(settings),
        "activation": read_activation(settings, "hidden_activation", "gelu"),
        "transformed": _transform(settings),
        **first_eos(settings),
    }


def _write(config: ModernBERTConfig) -> dict[str, Any]:
    thetas = {FULL: config.rope_theta, LOCAL: config.local_theta}
    head = config.head
    transform = config.transformed
    if head is not None and head.transform is not None:
        transform = head.transform
    pools = {ours: theirs for theirs, ours in _POOLS.items()}
    return {
        "rope_parameters": {
            kind: write_rope(theta)["rope_parameters"] for kind, theta in thetas.items()
        },
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.local_theta,
        "global_attn_every_n_layers": config.full_every,
        "layer_types": write_kinds(config.decoder().sees_all),
        "hidden_activation": write_activation(config.activation),
        "classifier_activation": write_activation(transform.activation),
        "classifier_bias": transform.bias,
        "classifier_pooling": pools.get(head.pool or "first", "cls") if head else "cls",
        "eos_token_id": config.eos,
        "pad_token_id": config.pad,
    }


CONVERSION = Conversion(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    config=ModernBERTConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "hidden_size"),
        setting("layers", "num_hidden_layers"),
        setting("heads", "num_attention_heads"),
        setting("mlp", "intermediate_size"),
        setting("max_seq", "max_position_embeddings", default=8192),
        setting("norm_eps", "norm_eps", default=1e-5),
        setting("norm_bias", "norm_bias", default=False),
        setting("attention_bias", "attention_bias", default=False),
        setting("mlp_bias", "mlp_bias", default=False),
        setting("head_bias", "decoder_bias", default=True),
        setting("window", "local_attention", default=128),
        setting("tied", "tie_word_embeddings", default=True),
        setting("init_std", "initializer_range", default=0.02),
    ),
    forms={
        ROWS: Form(head=_of_rows, links=_CLASSES),
        TOKENS: Form(
            head=lambda settings, outputs: HeadConfig(
                outputs=outputs, transform=_transform(settings)
            ),
            links=_CLASSES,
        ),
    },
    links=LINKS,
    head="decoder.weight",
    prefix="model.",
    read=_read,
    write=_write,
)
