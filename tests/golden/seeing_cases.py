"""Golden cases of decoders that read images among their words."""

from typing import Any

import transformers
from edits import Case, reconfigured, rolled, without, zeroed
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
}
