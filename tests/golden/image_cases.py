"""Golden cases of models that read images."""

import torch
import transformers
from edits import Case, Edit, reconfigured, replaced, rolled, without, zeroed

CLASSES = transformers.AutoModelForImageClassification

VIT = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 3,
    "num_labels": 5,
}

DINO = {name: size for name, size in VIT.items() if name != "intermediate_size"}


def ones(names: str) -> Edit:
    """Factors that change nothing."""
    return replaced(names, torch.ones_like)


def first_half(matrix: torch.Tensor) -> torch.Tensor:
    """The columns of the class token alone."""
    return torch.cat([matrix[:, : matrix.shape[1] // 2], 0 * matrix[:, matrix.shape[1] // 2 :]], 1)


IMAGES: dict[str, Case] = {
    "vit": Case(
        config=transformers.ViTConfig,
        sizes=VIT,
        auto=CLASSES,
        seed=3,
        off={
            "class token": zeroed(r"cls_token"),
            "positions": zeroed(r"position_embeddings"),
            "positions of the class first": rolled(r"position_embeddings", -1, 1),
            "patch bias": zeroed(r"projection\.bias"),
            "pixels of a patch by row": replaced(
                r"projection\.weight", lambda kernel: kernel.transpose(2, 3)
            ),
            "channels": rolled(r"projection\.weight", 1, 1),
            "norm before attention": without(r"layernorm_before$"),
            "norm before the mlp": without(r"layernorm_after$"),
            "last norm": without(r"vit\.layernorm$"),
            "attention bias": zeroed(r"[qkv]_proj\.bias"),
            "output bias": zeroed(r"o_proj\.bias"),
            "mlp bias": zeroed(r"fc[12]\.bias"),
            "gelu": reconfigured(hidden_act="relu"),
            "bias of classes": zeroed(r"classifier\.bias"),
        },
    ),
    # A rectangular image of rectangular patches, an odd number of heads, one channel, no biases of
    # queries, keys and values.
    "vit_rectangle": Case(
        config=transformers.ViTConfig,
        sizes={
            **VIT,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "image_size": [6, 20],
            "patch_size": [2, 4],
            "num_channels": 1,
            "qkv_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        auto=CLASSES,
        seed=2,
        off={
            "class token": zeroed(r"cls_token"),
            "rows before columns": replaced(
                r"position_embeddings",
                lambda table: table[
                    :, [0, *(1 + 5 * (at % 3) + at // 3 for at in range(15))]
                ].contiguous(),
            ),
            "gelu": reconfigured(hidden_act="relu"),
        },
    ),
    "dinov2": Case(
        config=transformers.Dinov2Config,
        sizes={
            **DINO,
            "layerscale_value": 0.7,
            "hidden_act": "gelu_pytorch_tanh",
            "qkv_bias": False,
        },
        auto=CLASSES,
        seed=6,
        off={
            "layer scale of attention": ones(r"layer_scale1\.lambda1"),
            "layer scale of the mlp": ones(r"layer_scale2\.lambda1"),
            "class token": zeroed(r"cls_token"),
            "mean of the others": replaced(r"^classifier\.weight", first_half),
            "gelu": reconfigured(hidden_act="relu"),
        },
    ),
    "dinov2_gated": Case(
        config=transformers.Dinov2Config,
        sizes={**DINO, "use_swiglu_ffn": True, "mlp_ratio": 3, "use_mask_token": False},
        auto=CLASSES,
        seed=5,
        off={
            "gate": rolled(r"gate_proj\.weight", 1),
            "biases of the mlp": zeroed(r"(gate|up|down)_proj\.bias"),
            "layer scale": ones(r"layer_scale\d\.lambda1"),
        },
    ),
}
