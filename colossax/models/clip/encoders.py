"""What families of two encoders, of texts and of images, have in common in Hugging Face files.

Their config.json has the settings of each encoder in an object of its own.
"""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count, NotNegative
from colossax.errors import InputError
from colossax.models.conversion import Link, link
from colossax.models.settings import checked, read_activation, write_activation
from colossax.models.vit.convert import read_sizes, write_sizes
from colossax.nn.config.dual import EncoderPart

TEXT, IMAGE = "text_config", "vision_config"

_COUNTS = {
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}


def read_part(settings: Mapping[str, Any], defaults: EncoderPart) -> EncoderPart:
    """Sizes of an encoder.

    Args:
        settings: Of it alone.
        defaults: Of what they leave out.

    Raises:
        InputError: One is of another type, or asks for what there is not.
    """
    counts = {
        ours: checked(theirs, settings.get(theirs, getattr(defaults, ours)), Count)
        for ours, theirs in _COUNTS.items()
    }
    eps = settings.get("layer_norm_eps", defaults.norm_eps)
    usual = write_activation(defaults.activation)
    return EncoderPart(
        **counts,
        activation=read_activation(settings, "hidden_act", usual),
        norm_eps=checked("layer_norm_eps", eps, NotNegative),
    )


def write_part(part: EncoderPart) -> dict[str, Any]:
    """Likewise, written."""
    return {
        **{theirs: getattr(part, ours) for ours, theirs in _COUNTS.items()},
        "hidden_act": write_activation(part.activation),
        "layer_norm_eps": part.norm_eps,
    }


def read_images(settings: Mapping[str, Any], patch: int) -> dict[str, int]:
    """Our sizes of images and patches.

    Args:
        settings: Of the encoder of images.
        patch: Size of a patch where they leave it out.

    Raises:
        InputError: One is no number of pixels.
    """
    channels = checked("num_channels", settings.get("num_channels", 3), Count)
    return {"channels": channels, **read_sizes(settings, _sizes(patch))}


def write_images(config: Any, family: str) -> dict[str, Any]:
    """Likewise, written.

    Raises:
        InputError: Images or patches are no squares, for which the format has one number.
    """
    for name in ("", "patch_"):
        height, width = (getattr(config, f"{name}{side}") for side in ("height", "width"))
        if height != width:
            raise InputError(
                f"{family} config: {name}height {height} and {name}width {width} cannot be"
                " exported; the format has one number for both"
            )
    return {"num_channels": config.channels, **write_sizes(config, _sizes(0))}


def _sizes(patch: int) -> dict[str, tuple]:
    return {
        "image_size": ("height", "width", 224),
        "patch_size": ("patch_height", "patch_width", patch),
    }


def part_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of one encoder; none are said where there is no such object.

    Raises:
        InputError: It is no object.
    """
    return checked(name, settings.get(name), dict | None) or {}


def encoder_links(foreign: str, ours: str) -> tuple[Link, ...]:
    """Tensors of the layers of one encoder, which both families call alike."""
    layer, here = f"{foreign}.encoder.layers.{{layer}}", f"{ours}/layers"
    links = [
        link(f"{layer}.self_attn.{name}_proj.{end}", dims, f"{here}/attn/{name}/{our}")
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
        for end, our, dims in (
            ("weight", "w", f"({heads} head_dim) embed"),
            ("bias", "b", f"({heads} head_dim)"),
        )
    ]
    links += [
        link(f"{layer}.self_attn.out_proj.weight", "embed (heads head_dim)", f"{here}/attn/o/w"),
        link(f"{layer}.self_attn.out_proj.bias", "embed", f"{here}/attn/o/b"),
        link(f"{layer}.mlp.fc1.weight", "mlp embed", f"{here}/mlp/up/w"),
        link(f"{layer}.mlp.fc1.bias", "mlp", f"{here}/mlp/up/b"),
        link(f"{layer}.mlp.fc2.weight", "embed mlp", f"{here}/mlp/down/w"),
        link(f"{layer}.mlp.fc2.bias", "embed", f"{here}/mlp/down/b"),
    ]
    for theirs, norm in (("layer_norm1", "attn_norm"), ("layer_norm2", "mlp_norm")):
        links += norm_links(f"{layer}.{theirs}", f"{here}/{norm}")
    return tuple(links)


def inner_links(links: tuple[Link, ...], ours: str, foreign: str = "") -> tuple[Link, ...]:
    """Tensors of a model that is a part of another one, here and in files."""
    return tuple(
        link(f"{foreign}{one.foreign}", one.layout, *(f"{ours}/{path}" for path in one.ours))
        for one in links
    )


def norm_links(foreign: str, ours: str) -> tuple[Link, ...]:
    """Of one norm."""
    return (
        link(f"{foreign}.weight", "embed", f"{ours}/scale"),
        link(f"{foreign}.bias", "embed", f"{ours}/bias"),
    )


TEXT_FRONT = (
    link("text_model.embeddings.token_embedding.weight", "vocab embed", "text/embed/table"),
    link(
        "text_model.embeddings.position_embedding.weight",
        "positions embed",
        "text/positions/table",
    ),
)
_PATCHES = "vision_model.embeddings.patch_embedding"
IMAGE_FRONT = (
    link(
        f"{_PATCHES}.weight",
        "embed channels patch_height patch_width",
        "image/patches/map/w",
    ),
    link(f"{_PATCHES}.bias", "embed", "image/patches/map/b"),
    link(
        "vision_model.embeddings.position_embedding.weight",
        "positions embed",
        "image/positions/table",
    ),
)

POSITIONS = (r"(text|vision)_model\.embeddings\.position_ids",)
"""Tensors that hold no parameters."""
