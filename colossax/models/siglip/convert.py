"""SigLIP's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count
from colossax.errors import InputError
from colossax.models.clip.encoders import (
    IMAGE,
    IMAGE_FRONT,
    POSITIONS,
    TEXT,
    TEXT_FRONT,
    encoder_links,
    norm_links,
    part_of,
    read_images,
    read_part,
    write_images,
    write_part,
)
from colossax.models.conversion import Conversion, link
from colossax.models.settings import checked
from colossax.models.siglip.config import SigLIPConfig
from colossax.nn.config.dual import EncoderPart

_USUAL = EncoderPart(
    embed=768, layers=12, heads=12, mlp=3072, activation="gelu_tanh", norm_eps=1e-6
)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    text, image = part_of(settings, TEXT), part_of(settings, IMAGE)
    counts = {"vocab": ("vocab_size", 32000), "max_seq": ("max_position_embeddings", 64)}
    if not checked("vision_use_head", image.get("vision_use_head", True), bool):
        raise InputError(
            "config.json: siglip with vision_use_head = False is not supported; only True is"
        )
    parts = {"text": read_part(text, _USUAL), "image": read_part(image, _USUAL)}
    said = text.get("projection_size")
    width = parts["text"].embed if said is None else checked("projection_size", said, Count)
    if width != parts["image"].embed:
        raise InputError(
            f"config.json: siglip with texts of projection_size {width} and images of hidden_size"
            f" {parts['image'].embed} is not supported; their embeddings are compared, so both must"
            " be as wide"
        )
    return {
        **parts,
        **{
            ours: checked(name, text.get(name, usual), Count)
            for ours, (name, usual) in counts.items()
        },
        **read_images(image, 16),
    }


def _write(config: SigLIPConfig) -> dict[str, Any]:
    return {
        TEXT: {
            "model_type": "siglip_text_model",
            "vocab_size": config.vocab,
            "max_position_embeddings": config.max_seq,
            "projection_size": config.image.embed,
            **write_part(config.text),
        },
        IMAGE: {
            "model_type": "siglip_vision_model",
            **write_images(config, "siglip"),
            **write_part(config.image),
        },
    }


_HEAD, _POOL = "vision_model.head", "image/answers/query"

CONVERSION = Conversion(
    model_type="siglip",
    architecture="SiglipModel",
    config=SigLIPConfig,
    settings=(),
    forms={},
    links=(
        link("logit_scale", "1", "log_scale"),
        link("logit_bias", "1", "shift"),
        *TEXT_FRONT,
        *encoder_links("text_model", "text"),
        *norm_links("text_model.final_layer_norm", "text/norm"),
        link("text_model.head.weight", "outputs embed", "text/answers/map/w"),
        link("text_model.head.bias", "outputs", "text/answers/map/b"),
        *IMAGE_FRONT,
        *encoder_links("vision_model", "image"),
        *norm_links("vision_model.post_layernorm", "image/norm"),
        link(f"{_HEAD}.probe", "1 1 embed", f"{_POOL}/probe"),
        link(
            f"{_HEAD}.attention.in_proj_weight",
            "(heads|kv_heads|kv_heads head_dim) embed",
            *(f"{_POOL}/attn/{name}/w" for name in "qkv"),
        ),
        link(
            f"{_HEAD}.attention.in_proj_bias",
            "(heads|kv_heads|kv_heads head_dim)",
            *(f"{_POOL}/attn/{name}/b" for name in "qkv"),
        ),
        link(f"{_HEAD}.attention.out_proj.weight", "embed (heads head_dim)", f"{_POOL}/attn/o/w"),
        link(f"{_HEAD}.attention.out_proj.bias", "embed", f"{_POOL}/attn/o/b"),
        *norm_links(f"{_HEAD}.layernorm", f"{_POOL}/norm"),
        link(f"{_HEAD}.mlp.fc1.weight", "mlp embed", f"{_POOL}/up/w"),
        link(f"{_HEAD}.mlp.fc1.bias", "mlp", f"{_POOL}/up/b"),
        link(f"{_HEAD}.mlp.fc2.weight", "embed mlp", f"{_POOL}/down/w"),
        link(f"{_HEAD}.mlp.fc2.bias", "embed", f"{_POOL}/down/b"),
    ),
    ignored=POSITIONS,
    read=_read,
    write=_write,
)
