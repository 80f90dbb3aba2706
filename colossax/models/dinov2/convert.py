"""DINOv2's names and layouts in Hugging Face files."""

import math
from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Positive
from colossax.errors import InputError
from colossax.models.conversion import Conversion, Link, link, setting
from colossax.models.dinov2.config import DINOv2Config
from colossax.models.settings import IMAGES, Form, checked, read_activation, write_activation
from colossax.models.vit.convert import CLASSES, SETTINGS, read_sizes, write_sizes
from colossax.nn.config import HeadConfig

_SIZES = {"image_size": ("height", "width", 224), "patch_size": ("patch_height", "patch_width", 14)}
_FRONT, _LAYER = "dinov2.embeddings", "dinov2.encoder.layer.{layer}"
_ATTENTION = f"{_LAYER}.attention.attention"


def _gated_width(wide: int) -> int:
    """Of a gated MLP in place of a plain one so wide: two thirds, rounded up to eights."""
    return (int(wide * 2 / 3) + 7) // 8 * 8


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    gated = checked("use_swiglu_ffn", settings.get("use_swiglu_ffn", False), bool)
    ratio = checked("mlp_ratio", settings.get("mlp_ratio", 4), Positive)
    embed = checked("hidden_size", settings.get("hidden_size", 768), Count)
    wide = int(embed * ratio)
    return {
        "mlp": _gated_width(wide) if gated else wide,
        "gated": gated,
        "activation": "silu" if gated else read_activation(settings, "hidden_act", "gelu"),
        **read_sizes(settings, _SIZES),
    }


def _ratio(config: DINOv2Config) -> int | float:
    """`mlp_ratio` of config.json, from which the width of the MLP is computed and rounded down.

    Raises:
        InputError: None gives it.
    """
    embed, mlp = config.embed, config.mlp
    if config.gated and mlp % 8:
        raise InputError(
            f"dinov2 config: a gated MLP of width {mlp} cannot be exported; the format has"
            f" multiples of 8 alone: {-(-mlp // 8) * 8}"
        )
    wide = round(1.5 * mlp / embed) * embed
    if not config.gated or _gated_width(wide) != mlp:
        wide = -(-3 * mlp // 2) if config.gated else mlp
    ratio = wide / embed
    if int(embed * ratio) < wide:
        ratio = math.nextafter(ratio, math.inf)
    return int(ratio) if ratio == int(ratio) else ratio


def _write(config: DINOv2Config) -> dict[str, Any]:
    if config.gated and config.activation != "silu":
        raise InputError(
            f"dinov2 config: a gate of {config.activation} cannot be exported; the format has silu"
            " alone"
        )
    if config.height != config.width:
        raise InputError(
            f"dinov2 config: images of {config.height} x {config.width} pixels cannot be exported;"
            " the format's learned positions are those of a square"
        )
    return {
        "mlp_ratio": _ratio(config),
        "use_swiglu_ffn": config.gated,
        "use_mask_token": False,  # what stands for masked patches is left aside
        "hidden_act": "gelu" if config.gated else write_activation(config.activation),
        **write_sizes(config, _SIZES),
    }


_UP, _DOWN = "layers/mlp/up", "layers/mlp/down"
_PLAIN = (
    link(f"{_LAYER}.mlp.fc1.weight", "mlp embed", f"{_UP}/w"),
    link(f"{_LAYER}.mlp.fc1.bias", "mlp", f"{_UP}/b"),
    link(f"{_LAYER}.mlp.fc2.weight", "embed mlp", f"{_DOWN}/w"),
    link(f"{_LAYER}.mlp.fc2.bias", "embed", f"{_DOWN}/b"),
)
_GATED = (
    link(f"{_LAYER}.mlp.weights_in.weight", "(part mlp) embed", "layers/mlp/gate/w", f"{_UP}/w"),
    link(f"{_LAYER}.mlp.weights_in.bias", "(part mlp)", "layers/mlp/gate/b", f"{_UP}/b"),
    link(f"{_LAYER}.mlp.weights_out.weight", "embed mlp", f"{_DOWN}/w"),
    link(f"{_LAYER}.mlp.weights_out.bias", "embed", f"{_DOWN}/b"),
)
_LINKS = (
    link(f"{_FRONT}.cls_token", "1 1 embed", "patches/class_token"),
    link(f"{_FRONT}.position_embeddings", "1 positions embed", "positions/table"),
    link(
        f"{_FRONT}.patch_embeddings.projection.weight",
        "embed channels patch_height patch_width",
        "patches/map/w",
    ),
    link(f"{_FRONT}.patch_embeddings.projection.bias", "embed", "patches/map/b"),
    link(f"{_LAYER}.norm1.weight", "embed", "layers/attn_norm/scale"),
    link(f"{_LAYER}.norm1.bias", "embed", "layers/attn_norm/bias"),
    link(f"{_ATTENTION}.query.weight", "(heads head_dim) embed", "layers/attn/q/w"),
    link(f"{_ATTENTION}.query.bias", "(heads head_dim)", "layers/attn/q/b"),
    link(f"{_ATTENTION}.key.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
    link(f"{_ATTENTION}.key.bias", "(kv_heads head_dim)", "layers/attn/k/b"),
    link(f"{_ATTENTION}.value.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
    link(f"{_ATTENTION}.value.bias", "(kv_heads head_dim)", "layers/attn/v/b"),
    link(f"{_LAYER}.attention.output.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"),
    link(f"{_LAYER}.attention.output.dense.bias", "embed", "layers/attn/o/b"),
    link(f"{_LAYER}.layer_scale1.lambda1", "embed", "layers/attn_scale/scale"),
    link(f"{_LAYER}.norm2.weight", "embed", "layers/mlp_norm/scale"),
    link(f"{_LAYER}.norm2.bias", "embed", "layers/mlp_norm/bias"),
    link(f"{_LAYER}.layer_scale2.lambda1", "embed", "layers/mlp_scale/scale"),
    link("dinov2.layernorm.weight", "embed", "norm/scale"),
    link("dinov2.layernorm.bias", "embed", "norm/bias"),
)


def _links(config: DINOv2Config) -> tuple[Link, ...]:
    return (*_LINKS, *(_GATED if config.gated else _PLAIN))


CONVERSION = Conversion(
    model_type="dinov2",
    architecture="Dinov2Model",
    config=DINOv2Config,
    settings=(
        *(one for one in SETTINGS if one.ours not in ("mlp", "norm_eps")),
        setting("layer_scale", "layerscale_value", default=1.0),
        setting("norm_eps", "layer_norm_eps", default=1e-6),
    ),
    links=_LINKS,
    links_of=_links,
    forms={
        IMAGES: Form(
            head=lambda _, outputs: HeadConfig(outputs=outputs, pool="first_mean"),
            links=CLASSES,
        )
    },
    prefix="dinov2.",
    ignored=(r"dinov2\.embeddings\.mask_token",),
    read=_read,
    write=_write,
)
