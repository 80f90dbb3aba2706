"""Golden cases of models that embed texts and images side by side."""

import copy
from typing import Any

import torch
import transformers
from edits import Case, Edit, Model, reconfigured, replaced, rolled, without, zeroed

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
}
IMAGE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 2,
}


def clip(text: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a CLIP."""
    return {
        "text_config": {**TEXT, "projection_dim": 24, **text},
        "vision_config": {**IMAGE, "projection_dim": 24, **image},
        "projection_dim": 24,
    }


def part(name: str, **changes: Any) -> Edit:
    """The same weights, one encoder under a changed configuration."""

    def edit(model: Model) -> Model:
        changed = copy.deepcopy(getattr(model.config, name))
        for key, value in changes.items():
            setattr(changed, key, value)
        return reconfigured(**{name: changed})(model)

    return edit


def pooled_at(where: int) -> Edit:
    """A CLIP whose texts' states are those of this token."""

    def edit(model: Model) -> Model:
        text = model.text_model

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = type(text).forward(text, *args, **kwargs)
            out.pooler_output = out.last_hidden_state[:, where]
            return out

        text.forward = forward
        return model

    return edit


def unmasked(model: Model) -> Model:
    """A CLIP whose texts are read from both sides."""
    text = model.text_model
    for layer in text.encoder.layers:
        inner = layer.self_attn.forward

        def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            return inner(*args, **{**kwargs, "attention_mask": None, "is_causal": False})

        layer.self_attn.forward = forward
    return model


CLIP_OFF: dict[str, Edit] = {
    "end of the text": pooled_at(-1),
    "causal": unmasked,
    "positions of texts": zeroed(r"text_model.*position_embedding"),
    "positions of patches": rolled(r"vision_model.*position_embedding", 1),
    "class token": zeroed(r"class_embedding"),
    "norm of embeddings": without(r"pre_layrnorm$"),
    "last norm of texts": without(r"text_model\.final_layer_norm$"),
    "last norm of images": without(r"post_layernorm$"),
    "map of texts": rolled(r"text_projection", 1),
    "map of images": rolled(r"visual_projection", 1),
    "scale": replaced(r"logit_scale", torch.zeros_like),
}

IMAGE_TEXTS: dict[str, Case] = {
    "clip": Case(
        config=transformers.CLIPConfig,
        sizes=clip({"eos_token_id": 100}, {}),
        auto=transformers.AutoModel,
        seed=1,
        off={
            **CLIP_OFF,
            "the token that ends": part("text_config", eos_token_id=2),
            "quick gelu": part("text_config", hidden_act="gelu"),
        },
    ),
    "clip_older": Case(
        config=transformers.CLIPConfig,
        sizes=clip(
            {"eos_token_id": 2, "hidden_act": "gelu"},
            {"layer_norm_eps": 0.1, "hidden_act": "gelu_pytorch_tanh", "num_channels": 1},
        ),
        auto=transformers.AutoModel,
        seed=6,
        off={
            "end of the text": pooled_at(-1),
            "the highest ends": part("text_config", eos_token_id=99),
            "eps of images": part("vision_config", layer_norm_eps=1e-6),
            "gelu": part("text_config", hidden_act="quick_gelu"),
        },
    ),
    "siglip": Case(
        config=transformers.SiglipConfig,
        sizes={
            "text_config": {**TEXT, "projection_size": 48},
            "vision_config": IMAGE,
        },
        auto=transformers.AutoModel,
        seed=3,
        off={
            "probe": zeroed(r"head\.probe"),
            "attention of the probe": zeroed(r"head\.attention\.out_proj\.weight"),
            "order of its heads": replaced(
                r"head\.attention\.in_proj_weight", lambda w: w.roll(48, 0)
            ),
            "mlp of the probe": zeroed(r"head\.mlp\.fc2\.weight"),
            "norm of the probe": without(r"vision_model\.head\.layernorm$"),
            "bias of texts": zeroed(r"text_model\.head\.bias"),
            "last norm of texts": without(r"text_model\.final_layer_norm$"),
            "last norm of images": without(r"post_layernorm$"),
            "scale": replaced(r"logit_scale", torch.zeros_like),
            "shift": replaced(r"logit_bias", torch.zeros_like),
        },
    ),
}
