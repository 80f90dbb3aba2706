"""Weights that make every part of a golden model count."""

import re

import numpy as np
import torch
from edits import Model
from torch import nn
from transformers.pytorch_utils import Conv1D


def draw_weights(model: Model, seed: int) -> None:
    """Weights that make every part of the model count; the same on every machine."""
    # RandomState's streams are frozen, unlike those of torch and of np.random.Generator.
    random = np.random.RandomState(seed)
    # T5's configuration says that weights are tied even where they are not.
    words = getattr(model.config, "tie_word_embeddings", False)  # models of images have none
    tied = getattr(model.config, "scale_decoder_outputs", words)
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:  # sines and cosines of Whisper's positions
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        noise = random.standard_normal(tuple(parameter.shape))
        values = scaled(owner, name, noise, tied=tied, family=model.config.model_type)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "final_logits_bias")):
            noise = 0.2 * random.standard_normal(tuple(buffer.shape))
            buffer.copy_(torch.from_numpy(noise.astype(np.float32)))


DECODER_GAINS = {
    "self_attn.out": 3.0,
    "encoder_attn.out": 0.3,
    "fc1": 1.2,
    "fc2": 0.6,
    "q_proj": 2.0,
    "k_proj": 2.0,
}
"""Of the decoders of BART and Whisper, whose greedy text would else repeat one token: a source is
the same at each step, and BART's norms stand after sums."""


def scaled(
    owner: nn.Module, name: str, noise: np.ndarray, *, tied: bool, family: str
) -> np.ndarray:
    """Unit noise turned into a parameter of `owner`.

    Matrices enlarge what they get and embeddings are small, so that layers outweigh the residual;
    else a tied head would repeat the last token for ever.
    """
    kind = type(owner).__name__
    if name in ("logit_scale", "logit_bias"):
        return 2.5 + 0.3 * noise if name == "logit_scale" else noise - 3
    if kind.startswith("Gemma") and noise.ndim == 1:
        # These multiply by 1 + it; what sublayers give is normed too, and has to outweigh.
        return 0.3 * noise + (2.0 if "post_" in name else 0.5 if name == "model.norm.weight" else 0)
    if kind.startswith("Bart"):
        return noise * (3.0 if "positions" in name else 0.25)
    if kind.endswith("ScaledWordEmbedding"):
        return noise * 0.15
    if isinstance(owner, nn.Embedding):
        return noise * (0.25 if tied else 0.8)
    if name == "decoder.final_layer_norm.weight" and kind.startswith("T5") and tied:
        return 6 * (1 + 0.3 * noise)  # logits are divided by the root of the width
    if name.endswith(("class_embedding", "head.probe")):
        return noise * 0.8
    if noise.ndim == 1 and name.endswith("weight"):
        return (1 + 0.3 * noise) * (0.4 if "embeddings_layernorm" in name else 1.0)
    if noise.ndim == 1:
        return 0.2 * noise
    if name.endswith(("cls_token", "position_embeddings")):
        return noise * 0.8
    if isinstance(owner, nn.Conv1d | nn.Conv2d):
        return noise * 1.8 / np.sqrt(noise[0].size)
    fan_in = noise.shape[0] if isinstance(owner, Conv1D) else noise.shape[-1]
    if name.startswith("model.decoder.layers.") and family in ("bart", "whisper"):
        hits = (gain for part, gain in DECODER_GAINS.items() if part in name)
        return noise * next(hits, 1.8) / np.sqrt(fan_in)
    if "Attention.q." in name:  # T5 does not divide scores by the root of a head's size
        return noise * 0.4 / np.sqrt(fan_in)
    # Sharper attention and larger logits than these would only enlarge rounding.
    gain = (
        1.2
        if re.search(
            r"[qk]_proj|Attention\.k\.|(q|kv)_[ab]_proj|c_attn|query_key_value|self\.(query|key)\.|Wqkv|lm_head",
            name,
        )
        else 1.8
    )
    return noise * gain / np.sqrt(fan_in)
