"""ViT's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count
from colossax.errors import InputError
from colossax.models.conversion import Conversion, link, setting
from colossax.models.settings import IMAGES, Form, checked, read_activation, write_activation
from colossax.models.vit.config import ViTConfig
from colossax.nn.config import HeadConfig

_SIZES = {"image_size": ("height", "width", 224), "patch_size": ("patch_height", "patch_width", 16)}
"""Settings that are one number, or a height and a width; our fields, and the default."""


def read_sizes(settings: Mapping[str, Any], names: Mapping[str, tuple]) -> dict[str, int]:
    """Our heights and widths, of settings that are one number for both or a list of two.

    Args:
        settings: Of config.json.
        names: Of each such setting our two fields, and its default.

    Raises:
        InputError: One is neither.
    """
    fields = {}
    for name, (height, width, default) in names.items():
        found = settings.get(name, default)
        both = found if isinstance(found, list) else [found, found]
        if len(both) != 2:
            raise InputError(
                f"config.json: '{name}' is {found!r}; it must be one number, or height and width"
            )
        fields[height], fields[width] = (checked(name, one, Count) for one in both)
    return fields


def write_sizes(config: Any, names: Mapping[str, tuple]) -> dict[str, Any]:
    """Likewise, written: one number where both are alike."""
    pairs = {name: [getattr(config, one) for one in ours[:2]] for name, ours in names.items()}
    return {name: pair[0] if pair[0] == pair[1] else pair for name, pair in pairs.items()}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    activation = read_activation(settings, "hidden_act", "gelu")
    return {"activation": activation, **read_sizes(settings, _SIZES)}


def _write(config: ViTConfig) -> dict[str, Any]:
    return {"hidden_act": write_activation(config.activation), **write_sizes(config, _SIZES)}


_FRONT, _LAYER = "vit.embeddings", "vit.encoder.layer.{layer}"
_ATTENTION = f"{_LAYER}.attention.attention"

SETTINGS = (
    setting("embed", "hidden_size", default=768),
    setting("layers", "num_hidden_layers", default=12),
    setting("heads", "num_attention_heads", default=12),
    setting("mlp", "intermediate_size", default=3072),
    setting("channels", "num_channels", default=3),
    setting("qkv_bias", "qkv_bias", default=True),
    setting("norm_eps", "layer_norm_eps", default=1e-12),
    setting("init_std", "initializer_range", default=0.02),
)
"""Sizes of encoders of images; DINOv2 has nearly all of them."""

CLASSES = (
    link("classifier.weight", "outputs embed", "answers/map/w"),
    link("classifier.bias", "outputs", "answers/map/b"),
)
"""Of both."""

CONVERSION = Conversion(
    model_type="vit",
    architecture="ViTModel",
    config=ViTConfig,
    settings=SETTINGS,
    forms={
        IMAGES: Form(
            head=lambda _, outputs: HeadConfig(outputs=outputs, pool="first"),
            links=CLASSES,
        )
    },
    links=(
        link(f"{_FRONT}.cls_token", "1 1 embed", "patches/class_token"),
        link(f"{_FRONT}.position_embeddings", "1 positions embed", "positions/table"),
        link(
            f"{_FRONT}.patch_embeddings.projection.weight",
            "embed channels patch_height patch_width",
            "patches/map/w",
        ),
        link(f"{_FRONT}.patch_embeddings.projection.bias", "embed", "patches/map/b"),
        link(f"{_LAYER}.layernorm_before.weight", "embed", "layers/attn_norm/scale"),
        link(f"{_LAYER}.layernorm_before.bias", "embed", "layers/attn_norm/bias"),
        link(f"{_ATTENTION}.query.weight", "(heads head_dim) embed", "layers/attn/q/w"),
        link(f"{_ATTENTION}.query.bias", "(heads head_dim)", "layers/attn/q/b"),
        link(f"{_ATTENTION}.key.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
        link(f"{_ATTENTION}.key.bias", "(kv_heads head_dim)", "layers/attn/k/b"),
        link(f"{_ATTENTION}.value.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
        link(f"{_ATTENTION}.value.bias", "(kv_heads head_dim)", "layers/attn/v/b"),
        link(
            f"{_LAYER}.attention.output.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"
        ),
        link(f"{_LAYER}.attention.output.dense.bias", "embed", "layers/attn/o/b"),
        link(f"{_LAYER}.layernorm_after.weight", "embed", "layers/mlp_norm/scale"),
        link(f"{_LAYER}.layernorm_after.bias", "embed", "layers/mlp_norm/bias"),
        link(f"{_LAYER}.intermediate.dense.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{_LAYER}.intermediate.dense.bias", "mlp", "layers/mlp/up/b"),
        link(f"{_LAYER}.output.dense.weight", "embed mlp", "layers/mlp/down/w"),
        link(f"{_LAYER}.output.dense.bias", "embed", "layers/mlp/down/b"),
        link("vit.layernorm.weight", "embed", "norm/scale"),
        link("vit.layernorm.bias", "embed", "norm/bias"),
    ),
    prefix="vit.",
    ignored=(r"vit\.pooler\..*", r"vit\.embeddings\.mask_token"),
    read=_read,
    write=_write,
)
