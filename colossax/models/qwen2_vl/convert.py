"""Qwen2-VL's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Natural, Positive
from colossax.errors import InputError
from colossax.models.clip.encoders import IMAGE, TEXT, inner_links, norm_links, part_of
from colossax.models.conversion import Conversion, link
from colossax.models.qwen2.convert import CONVERSION as QWEN2
from colossax.models.qwen2_vl.config import Qwen2VLConfig
from colossax.models.settings import checked, read_activation, write_activation
from colossax.nn import EncoderPart
from colossax.nn.config.seeing import ProjectorConfig

_WORDS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 151_645,
}
"""What files leave out of the decoder's settings."""

_COUNTS = {
    "embed_dim": 1280,
    "depth": 32,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Of the encoder's."""

_NORM_EPS = 1e-6
_TOKENS = 14
"""On each side of the image that is counted with; files name no size."""

_DEFAULT_SECTIONS = [16, 24, 24]


def _words(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Settings of the decoder, as Qwen 2 has them, and its sections; older files name them flat."""
    said = part_of(settings, TEXT) or {n: x for n, x in settings.items() if n != "architectures"}
    text = {**_WORDS, **said, "model_type": "qwen2", "architectures": None}
    sections: Any = _DEFAULT_SECTIONS
    for name in ("rope_parameters", "rope_scaling"):
        rope = dict(checked(name, text.pop(name, None), dict | None) or {})
        sections = rope.pop("mrope_section", sections)
        kind = rope.pop("type", None) or rope.pop("rope_type", None)
        if kind not in (None, "mrope", "default"):
            rope["rope_type"] = kind
        if rope:  # older files say there how axes share the dims, and no more
            text[name] = rope
    tied = settings.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
    return {**text, "tie_word_embeddings": tied}, checked("mrope_section", sections, list)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    image = part_of(settings, IMAGE)
    text, sections = _words(settings)
    counts = {name: checked(name, image.get(name, usual), Count) for name, usual in _COUNTS.items()}
    words = QWEN2.config_from(text)
    ratio = checked("mlp_ratio", image.get("mlp_ratio", 4), Positive)
    width = checked("hidden_size", image.get("hidden_size", words.embed), Count)
    if width != words.embed:
        raise InputError(
            f"config.json: vision_config.hidden_size is {width}, and the text's is {words.embed};"
            " what images give stands among its tokens: give that"
        )
    merge, embed = counts["spatial_merge_size"], counts["embed_dim"]
    rope = checked("rope_parameters", image.get("rope_parameters"), dict | None) or {}
    side = _TOKENS * merge * counts["patch_size"]
    channels = image.get("in_channels", image.get("in_chans", 3))
    return {
        "text": words,
        "sections": tuple(checked("mrope_section", one, Natural) for one in sections),
        "image_theta": checked("rope_theta", rope.get("rope_theta", 10_000.0), Positive),
        "frames": counts["temporal_patch_size"],
        "image": EncoderPart(
            embed=embed,
            layers=counts["depth"],
            heads=counts["num_heads"],
            mlp=int(embed * ratio),
            activation=read_activation(image, "hidden_act", "quick_gelu"),
            norm_eps=_NORM_EPS,
        ),
        "projector": ProjectorConfig(merge=merge, norm_eps=_NORM_EPS, width=embed * merge**2),
        "channels": checked("in_channels", channels, Count),
        "height": side,
        "width": side,
        "patch_height": counts["patch_size"],
        "patch_width": counts["patch_size"],
        "image_token": checked("image_token_id", settings.get("image_token_id", 151_655), Natural),
        "init_std": checked("initializer_range", image.get("initializer_range", 0.02), float),
    }


def _write(config: Qwen2VLConfig) -> dict[str, Any]:
    image, projector = config.image, config.projector
    if config.patch_height != config.patch_width:
        raise InputError(
            f"qwen2_vl config: patch_height {config.patch_height} and patch_width"
            f" {config.patch_width} cannot be exported; the format has one number for both"
        )
    if image.mlp % image.embed:
        raise InputError(
            f"qwen2_vl config: image.mlp {image.mlp} cannot be exported; the format has its share"
            f" of image.embed {image.embed}, a whole number"
        )
    text: dict[str, Any] = {**QWEN2.settings_of(config.text), "model_type": "qwen2_vl_text"}
    rope = {**text["rope_parameters"], "mrope_section": list(config.sections)}
    del text["architectures"]
    return {
        TEXT: {**text, "rope_parameters": rope},
        IMAGE: {
            "model_type": "qwen2_vl_vision",
            "embed_dim": image.embed,
            "depth": image.layers,
            "num_heads": image.heads,
            "mlp_ratio": image.mlp // image.embed,
            "hidden_act": write_activation(image.activation),
            "hidden_size": config.text.embed,
            "in_channels": config.channels,
            "patch_size": config.patch_height,
            "spatial_merge_size": projector.merge,
            "temporal_patch_size": config.frames,
            "initializer_range": config.init_std,
            "rope_parameters": {"rope_type": "axial", "rope_theta": config.image_theta},
        },
        "image_token_id": config.image_token,
        "tie_word_embeddings": config.text.tied,
    }


_BLOCK, _HERE = "visual.blocks.{layer}", "image/layers"

CONVERSION = Conversion(
    model_type="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    config=Qwen2VLConfig,
    settings=(),
    forms={},
    links=(
        *inner_links(QWEN2.links, "text"),
        link(
            "visual.patch_embed.proj.weight",
            "embed channels frames patch_height patch_width",
            "image/patches/map/w",
        ),
        *norm_links(f"{_BLOCK}.norm1", f"{_HERE}/attn_norm"),
        link(
            f"{_BLOCK}.attn.qkv.weight",
            "(heads|kv_heads|kv_heads head_dim) embed",
            *(f"{_HERE}/attn/{name}/w" for name in "qkv"),
        ),
        link(
            f"{_BLOCK}.attn.qkv.bias",
            "(heads|kv_heads|kv_heads head_dim)",
            *(f"{_HERE}/attn/{name}/b" for name in "qkv"),
        ),
        link(f"{_BLOCK}.attn.proj.weight", "embed (heads head_dim)", f"{_HERE}/attn/o/w"),
        link(f"{_BLOCK}.attn.proj.bias", "embed", f"{_HERE}/attn/o/b"),
        *norm_links(f"{_BLOCK}.norm2", f"{_HERE}/mlp_norm"),
        link(f"{_BLOCK}.mlp.fc1.weight", "mlp embed", f"{_HERE}/mlp/up/w"),
        link(f"{_BLOCK}.mlp.fc1.bias", "mlp", f"{_HERE}/mlp/up/b"),
        link(f"{_BLOCK}.mlp.fc2.weight", "embed mlp", f"{_HERE}/mlp/down/w"),
        link(f"{_BLOCK}.mlp.fc2.bias", "embed", f"{_HERE}/mlp/down/b"),
        *norm_links("visual.merger.ln_q", "projector/norm"),
        link("visual.merger.mlp.0.weight", "mlp embed", "projector/up/w"),
        link("visual.merger.mlp.0.bias", "mlp", "projector/up/b"),
        link("visual.merger.mlp.2.weight", "embed mlp", "projector/down/w"),
        link("visual.merger.mlp.2.bias", "embed", "projector/down/b"),
    ),
    begun={"model.visual.": "visual.", "model.language_model.": "model."},
    ignored=QWEN2.ignored,
    read=_read,
    write=_write,
)
