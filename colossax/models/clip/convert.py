"""CLIP's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count, NotNegative
from colossax.models.clip.config import CLIPConfig
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
from colossax.models.settings import checked, first_eos
from colossax.nn.config.dual import EncoderPart, OfScores

_USUAL = {"layers": 12, "activation": "quick_gelu", "norm_eps": 1e-5}
_TEXT = EncoderPart(embed=512, heads=8, mlp=2048, **_USUAL)
_IMAGE = EncoderPart(embed=768, heads=12, mlp=3072, **_USUAL)

_OLDER_EOS = 2
"""What files say that were written before the token's number mattered: the highest one is it."""


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Settings of an encoder; where older files have `text_config_dict` too, that counts alone."""
    older = f"{name}_dict"
    return part_of(settings, older if settings.get(older) is not None else name)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    text, image = (_part(settings, name) for name in (TEXT, IMAGE))
    eos = first_eos({"eos_token_id": 49407, **text})["eos"]
    counts = {"vocab": ("vocab_size", 49408), "max_seq": ("max_position_embeddings", 77)}
    first = settings.get("logit_scale_init_value", 2.6592)
    return {
        "text": read_part(text, _TEXT),
        "image": read_part(image, _IMAGE),
        **{
            ours: checked(name, text.get(name, usual), Count)
            for ours, (name, usual) in counts.items()
        },
        **read_images(image, 32),
        "projection": checked("projection_dim", settings.get("projection_dim", 512), Count),
        "log_scale": checked("logit_scale_init_value", first, OfScores),
        "init_std": checked("initializer_range", text.get("initializer_range", 0.02), NotNegative),
        "eos": None if eos == _OLDER_EOS else eos,
    }


def _write(config: CLIPConfig) -> dict[str, Any]:
    both = {"projection_dim": config.projection, "initializer_range": config.init_std}
    return {
        TEXT: {
            "model_type": "clip_text_model",
            "vocab_size": config.vocab,
            "max_position_embeddings": config.max_seq,
            "eos_token_id": _OLDER_EOS if config.eos is None else config.eos,
            **write_part(config.text),
            **both,
        },
        IMAGE: {
            "model_type": "clip_vision_model",
            **write_images(config, "clip"),
            **write_part(config.image),
            **both,
        },
        "projection_dim": config.projection,
        "logit_scale_init_value": config.log_scale,
    }


CONVERSION = Conversion(
    model_type="clip",
    architecture="CLIPModel",
    config=CLIPConfig,
    settings=(),
    forms={},
    links=(
        link("logit_scale", "", "log_scale"),
        *TEXT_FRONT,
        *encoder_links("text_model", "text"),
        *norm_links("text_model.final_layer_norm", "text/norm"),
        link("text_projection.weight", "outputs embed", "text/answers/map/w"),
        link("vision_model.embeddings.class_embedding", "embed", "image/patches/class_token"),
        *IMAGE_FRONT,
        *norm_links("vision_model.pre_layrnorm", "image/embed_norm"),
        *encoder_links("vision_model", "image"),
        *norm_links("vision_model.post_layernorm", "image/norm"),
        link("visual_projection.weight", "outputs embed", "image/answers/map/w"),
    ),
    ignored=POSITIONS,
    read=_read,
    write=_write,
)
