"""Golden cases of decoders that read images among their words."""

from typing import Any

import torch
import transformers
from edits import Case, Edit, Model, reconfigured, replaced, rolled, without, zeroed
from image_text_cases import part

TEXT = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
IMAGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 2,
}


def llava(**changes: Any) -> dict[str, Any]:
    """Sizes of a LLaVA."""
    return {"text_config": TEXT, "vision_config": IMAGE, "image_token_index": 127, **changes}


QWEN2_VL_TEXT = {
    **{name: size for name, size in TEXT.items() if name not in ("model_type", "rms_norm_eps")},
    "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
}
QWEN2_VL_IMAGE = {
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 4,
    "hidden_size": 64,
    "mlp_ratio": 2,
    "patch_size": 2,
    "in_channels": 3,
}


def turned_otherwise(name: str, **changes: Any) -> Edit:
    """The same weights with another rotary embedding in one part."""

    def edit(model: Model) -> Model:
        rope = getattr(model.config, name).rope_parameters
        return part(name, rope_parameters={**rope, **changes})(model)

    return edit


SEEING: dict[str, Case] = {
    "llava": Case(
        config=transformers.LlavaConfig,
        sizes=llava(image_seq_length=16),
        auto=transformers.AutoModelForImageTextToText,
        seed=3,
        off={
            "layer that is read": reconfigured(vision_feature_layer=-1),
            "first map": rolled(r"linear_1\.weight", 1),
            "its bias": zeroed(r"linear_1\.bias"),
            "second bias": zeroed(r"linear_2\.bias"),
            "activation": reconfigured(projector_hidden_act="relu"),
            "positions of patches": rolled(r"vision_tower.*position_embedding", 1),
            "class token": zeroed(r"class_embedding"),
            "norm of embeddings": without(r"pre_layrnorm$"),
            "quick gelu": part("vision_config", hidden_act="gelu"),
        },
    ),
    "llava_older": Case(
        config=transformers.LlavaConfig,
        sizes=llava(
            text_config={**TEXT, "num_key_value_heads": 4, "head_dim": 24},
            vision_feature_layer=1,
            projector_hidden_act="gelu_pytorch_tanh",
            multimodal_projector_bias=False,
            image_seq_length=16,
        ),
        auto=transformers.AutoModelForImageTextToText,
        seed=1,
        off={
            "layer that is read": reconfigured(vision_feature_layer=2),
            "second map": rolled(r"linear_2\.weight", 1),
            "activation": reconfigured(projector_hidden_act="relu"),
        },
    ),
    "qwen2_vl": Case(
        config=transformers.Qwen2VLConfig,
        sizes={
            "text_config": QWEN2_VL_TEXT,
            "vision_config": QWEN2_VL_IMAGE,
            "image_token_id": 127,
            "video_token_id": 126,
            "vision_start_token_id": 125,
            "vision_end_token_id": 124,
        },
        auto=transformers.AutoModelForImageTextToText,
        seed=5,
        off={
            "axes of words": turned_otherwise("text_config", mrope_section=[6, 1, 1]),
            "rope theta of images": turned_otherwise("vision_config", rope_theta=3.0),
            "frames": replaced(r"patch_embed", lambda w: w * torch.tensor([1.0, 0])[:, None, None]),
            "norm of merged patches": without(r"merger\.ln_q$"),
            "bias of merged patches": zeroed(r"merger\.mlp\.0\.bias"),
            "second map": rolled(r"merger\.mlp\.2\.weight", 1),
            "query bias": zeroed(r"layers.*q_proj\.bias"),
            "bias of the encoder": zeroed(r"attn\.qkv\.bias"),
            "quick gelu": part("vision_config", hidden_act="gelu"),
        },
    ),
}
