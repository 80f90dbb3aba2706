"""LLaVA's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Natural
from colossax.errors import InputError
from colossax.models.clip.encoders import (
    IMAGE,
    TEXT,
    encoder_links,
    inner_links,
    norm_links,
    part_of,
    read_images,
    read_part,
    write_images,
    write_part,
)
from colossax.models.conversion import Conversion, Link, link
from colossax.models.llama.convert import CONVERSION as LLAMA
from colossax.models.llava.config import LlavaConfig
from colossax.models.settings import checked, read_activation, write_activation
from colossax.nn import EncoderPart
from colossax.nn.config.seeing import ProjectorConfig

_WORDS = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
"""What files leave out of the decoder's settings: a Llama's."""

_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The encoder of images where files say nothing of it."""

_USUAL = EncoderPart(
    embed=768, layers=12, heads=12, mlp=3072, activation="quick_gelu", norm_eps=1e-5
)
"""What they leave out of its settings where they say something."""

_FOREIGN, _PROJECTOR = "vision_tower", "multi_modal_projector"


def _words(settings: Mapping[str, Any]) -> dict[str, Any]:
    text = {**_WORDS, **part_of(settings, TEXT)}
    tied = settings.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
    _only(text, TEXT, "llama")
    return {**text, "tie_word_embeddings": tied}


def _only(part: Mapping[str, Any], name: str, kind: str) -> None:
    found = part.get("model_type", kind)
    if found != kind:
        raise InputError(
            f"config.json: llava with {name}.model_type = {found!r} is not supported; only"
            f" {kind!r} is"
        )


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    image = part_of(settings, IMAGE) or _TOWER
    _only(image, IMAGE, "clip_vision_model")
    whole = read_part(image, _USUAL)
    strategy = settings.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise InputError(
            f"config.json: llava with vision_feature_select_strategy = {strategy!r} is not"
            " supported; only 'default' or 'full' is"
        )
    layer = checked("vision_feature_layer", settings.get("vision_feature_layer", -2), int)
    layers = layer if layer >= 0 else whole.layers + 1 + layer
    if not 1 <= layers <= whole.layers:
        raise InputError(
            f"config.json: 'vision_feature_layer' is {layer}, and the encoder of images has"
            f" {whole.layers} layers; give 1 to {whole.layers}, or -1 to {-whole.layers}"
        )
    bias = settings.get("multimodal_projector_bias", True)
    return {
        "text": LLAMA.config_from(_words(settings)),
        "image": EncoderPart(**{**vars(whole), "layers": layers}),
        "projector": ProjectorConfig(
            activation=read_activation(settings, "projector_hidden_act", "gelu"),
            bias=checked("multimodal_projector_bias", bias, bool),
            class_token=strategy == "full",
        ),
        **read_images(image, 32),
        "image_token": checked(
            "image_token_index", settings.get("image_token_index", 32_000), Natural
        ),
    }


def _write(config: LlavaConfig) -> dict[str, Any]:
    return {
        TEXT: LLAMA.settings_of(config.text),
        IMAGE: {
            "model_type": "clip_vision_model",
            **write_images(config, "llava"),
            **write_part(config.image),
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full" if config.projector.class_token else "default",
        "projector_hidden_act": write_activation(config.projector.activation),
        "multimodal_projector_bias": config.projector.bias,
        "image_token_index": config.image_token,
        "image_seq_length": config.places,
        "tie_word_embeddings": config.text.tied,
    }


def _map(foreign: str, ours: str, into: str, out: str) -> tuple[Link, ...]:
    return (
        link(f"{_PROJECTOR}.{foreign}.weight", f"{out} {into}", f"projector/{ours}/w"),
        link(f"{_PROJECTOR}.{foreign}.bias", out, f"projector/{ours}/b"),
    )


CONVERSION = Conversion(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    config=LlavaConfig,
    settings=(),
    forms={},
    links=(
        *inner_links(LLAMA.links, "text", "language_model."),
        link(f"{_FOREIGN}.embeddings.class_embedding", "embed", "image/patches/class_token"),
        link(
            f"{_FOREIGN}.embeddings.patch_embedding.weight",
            "embed channels patch_height patch_width",
            "image/patches/map/w",
        ),
        link(
            f"{_FOREIGN}.embeddings.position_embedding.weight",
            "positions embed",
            "image/positions/table",
        ),
        *norm_links(f"{_FOREIGN}.pre_layrnorm", "image/embed_norm"),
        *encoder_links(_FOREIGN, "image"),
        *_map("linear_1", "up", "embed", "mlp"),
        *_map("linear_2", "down", "mlp", "embed"),
    ),
    constant={
        f"{_FOREIGN}.post_layernorm.weight": ("image/embed_norm/scale", 1.0),
        f"{_FOREIGN}.post_layernorm.bias": ("image/embed_norm/bias", 0.0),
    },
    head="language_model.lm_head.weight",
    begun={
        "model.language_model.": "language_model.model.",
        "model.vision_tower.vision_model.": f"{_FOREIGN}.",
        "model.vision_tower.": f"{_FOREIGN}.",
        "vision_tower.vision_model.": f"{_FOREIGN}.",
        "model.multi_modal_projector.": f"{_PROJECTOR}.",
        "lm_head.": "language_model.lm_head.",
    },
    ignored=(
        r"vision_tower\.embeddings\.position_ids",
        # What stands behind the states that are taken.
        r"vision_tower\.post_layernorm\.(weight|bias)",
        r"vision_tower\.encoder\.layers\.\d+\..*",
        *(rf"language_model\.{one}" for one in LLAMA.ignored),
    ),
    read=_read,
    write=_write,
)
