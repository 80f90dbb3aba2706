"""Golden files: tiny models of `transformers`, with the logits and greedy tokens it gives for them.

    python tests/golden/regenerate.py            writes tests/golden/<case> and golden.json
    python tests/golden/regenerate.py --check    makes them anew and compares, then lets colossax
                                                 import and export each and reads the export back

Needs torch and transformers (and colossax for --check); the tests that read the files need neither.

A model whose logits hardly depend on a feature cannot show that the feature is right. So weights
are drawn large enough that logits have a standard deviation of at least 1, and for every feature a
case names the model is run again with the feature switched off (or done wrongly): the largest
change of a logit must exceed 0.01, a hundred times the tolerance of the tests, and is written to
golden.json. Nor may weights be so large that rounding alone moves logits: float64 is the judge.
"""

import argparse
import copy
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).resolve().parent
SEQ, PROMPT, NEW_TOKENS = 40, 12, 32
MIN_MOVED, MIN_STD, MIN_MARGIN, MIN_DISTINCT, MAX_ROUNDING = 1e-2, 1.0, 1e-3, 10, 7e-6
# Two forms of GELU differ by 5e-4 at most, so no weights of this size can move a logit by more.
FAINT, MIN_MOVED_FAINT = ("gelu by tanh",), 1e-3
LOGITS_TOLERANCE, EXPORT_TOLERANCE = 1e-5, 1e-4

Model = Any
Edit = Callable[[Model], Model]


class Mismatch(Exception):
    """A golden file does not have the property, or the value, it must have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One golden model.

    Attributes:
        config: Configuration class and its arguments.
        off: Per feature, an edit of a model that switches it off or does it wrongly.
        seed: Of weights and tokens.
        max_shard_size: Given, weights are saved in several files of this size with an index.
    """

    config: type
    sizes: dict[str, Any]
    off: dict[str, Edit]
    seed: int
    max_shard_size: str = "1GB"


def replaced(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The model with `change` applied to each parameter or buffer whose name matches."""

    def edit(model: Model) -> Model:
        named = [*model.named_parameters(), *model.named_buffers()]
        hits = [tensor for name, tensor in named if re.search(pattern, name)]
        if not hits:
            raise Mismatch(f"no parameter of {type(model).__name__} matches {pattern}")
        with torch.no_grad():
            for tensor in hits:
                tensor.copy_(change(tensor.clone()))
        return model

    return edit


def zeroed(pattern: str, rows: slice = slice(None)) -> Edit:
    """The model with these rows of each parameter or buffer whose name matches set to zero."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[rows] = 0
        return tensor

    return replaced(pattern, change)


def rolled(pattern: str, rows: int, dim: int = 0) -> Edit:
    """The model with each parameter whose name matches rolled by `rows` along `dim`."""
    return replaced(pattern, lambda tensor: tensor.roll(rows, dim))


def without(pattern: str) -> Edit:
    """The model with each module whose name matches replaced by the identity."""

    def edit(model: Model) -> Model:
        names = [name for name, _ in model.named_modules() if re.search(pattern, name)]
        if not names:
            raise Mismatch(f"no module of {type(model).__name__} matches {pattern}")
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Identity())
        return model

    return edit


def reconfigured(**changes: Any) -> Edit:
    """The same weights under a changed configuration."""

    def edit(model: Model) -> Model:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, value)
        other = build(type(config), config)
        other.load_state_dict(model.state_dict())
        return other

    return edit


def own_head(make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The model with a head of its own, made from the embedding table."""

    def edit(model: Model) -> Model:
        table = model.get_input_embeddings().weight.detach().clone()
        model.lm_head.weight = nn.Parameter(make(table))
        return model

    return edit


def no_alibi(model: Model) -> Model:
    """A BLOOM without distance penalties."""
    base = model.transformer
    build_alibi = base.build_alibi_tensor
    base.build_alibi_tensor = lambda *args, **kwargs: build_alibi(*args, **kwargs) * 0
    return model


def same_experts(model: Model) -> Model:
    """All experts of a layer as its first."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"\.experts\.", name):
                parameter.copy_(parameter[:1].clone().expand_as(parameter))
    return model


def norm_last(model: Model) -> Model:
    """An OPT whose layers norm their sums, not their inputs."""
    for layer in model.model.decoder.layers:
        layer.do_layer_norm_before = False
    return model


def split_in_thirds(heads: int) -> Edit:
    """A BLOOM whose fused rows, one (q, k, v) per head, are taken for all q, all k, all v."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        rest = tensor.shape[1:]
        return tensor.reshape(3, heads, -1, *rest).transpose(0, 1).reshape(-1, *rest)

    return replaced(r"query_key_value\.", change)


LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
# Wavelengths of 6, 17, 44 and 119 positions: one kept, two blended, one stretched.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
# One frequency kept, two blended, one divided; magnitudes of the rotary part and of logits differ.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
NO_ROPE = zeroed(r"rotary_emb\.inv_freq")
OTHER_THETA = reconfigured(rope_parameters={"rope_type": "default", "rope_theta": 300.0})
TIED_OFF = own_head(lambda table: table.roll(1, 0))

CASES: dict[str, Case] = {
    "llama": Case(
        config=transformers.LlamaConfig,
        sizes={**LLAMA, "tie_word_embeddings": False},
        seed=1,
        off={
            "grouped queries": rolled(r"[kv]_proj\.weight", 8),
            "untied head": own_head(lambda table: table),
            "rope": NO_ROPE,
            "rope theta": OTHER_THETA,
            "norm eps": reconfigured(rms_norm_eps=0.1),
        },
    ),
    "llama3": Case(
        config=transformers.LlamaConfig,
        sizes={
            **LLAMA,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": SCALED,
        },
        seed=132,
        off={
            "rope scaling": reconfigured(
                rope_parameters={"rope_type": "default", "rope_theta": 50.0}
            ),
            "rope blending": reconfigured(rope_parameters={**SCALED, "low_freq_factor": 3.9}),
            "tied head": TIED_OFF,
            "rope": NO_ROPE,
        },
    ),
    "llama_head_dim": Case(
        config=transformers.LlamaConfig,
        sizes={
            **LLAMA,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        seed=3,
        off={
            "scale by head_dim": replaced(r"q_proj", lambda tensor: tensor * 2**0.5),
            "attention bias": zeroed(r"[qkvo]_proj\.bias"),
            "output bias": zeroed(r"o_proj\.bias"),
            "mlp bias": zeroed(r"(gate|up|down)_proj\.bias"),
            "rope": NO_ROPE,
            "rope theta": OTHER_THETA,
        },
    ),
    "mistral": Case(
        config=transformers.MistralConfig,
        sizes={**LLAMA, "sliding_window": 9, "rms_norm_eps": 1e-5},
        seed=14,
        off={
            "sliding window": reconfigured(sliding_window=None),
            "window of one more": reconfigured(sliding_window=10),
            "grouped queries": rolled(r"[kv]_proj\.weight", 8),
            "rope": NO_ROPE,
        },
    ),
    "qwen2": Case(
        config=transformers.Qwen2Config,
        sizes={**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        seed=25,
        max_shard_size="40KB",
        off={
            "qkv bias": zeroed(r"[qkv]_proj\.bias"),
            "grouped queries": rolled(r"[kv]_proj\.", 8),
            "rope": NO_ROPE,
            "rope theta": OTHER_THETA,
        },
    ),
    "qwen3": Case(
        config=transformers.Qwen3Config,
        sizes={
            **LLAMA,
            "num_attention_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        seed=66,
        off={
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "qk norm scale": replaced(r"[qk]_norm\.weight", torch.ones_like),
            "tied head": TIED_OFF,
            "grouped queries": rolled(r"[kv]_proj\.weight", 16),
            "rope": NO_ROPE,
        },
    ),
    "mixtral": Case(
        config=transformers.MixtralConfig,
        sizes={**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        seed=1,
        off={
            "router": zeroed(r"mlp\.gate\.weight"),
            "two choices": reconfigured(num_experts_per_tok=1),
            "experts of their own": same_experts,
            "grouped queries": rolled(r"[kv]_proj\.weight", 8),
            "rope": NO_ROPE,
        },
    ),
    "qwen2_moe": Case(
        config=transformers.Qwen2MoeConfig,
        sizes={
            **LLAMA,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
        seed=1,
        off={
            "router": zeroed(r"mlp\.gate\.weight"),
            "weights as they are": reconfigured(norm_topk_prob=True),
            "shared expert": zeroed(r"shared_expert\.down_proj"),
            "gate of the shared expert": zeroed(r"shared_expert_gate"),
            "experts of their own": same_experts,
            "qkv bias": zeroed(r"[qkv]_proj\.bias"),
            "rope": NO_ROPE,
        },
    ),
    "qwen3_moe": Case(
        config=transformers.Qwen3MoeConfig,
        sizes={
            **LLAMA,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        seed=1,
        off={
            "router": zeroed(r"mlp\.gate\.weight"),
            "weights that sum to 1": reconfigured(norm_topk_prob=False),
            "experts of their own": same_experts,
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "rope": NO_ROPE,
        },
    ),
    "deepseek_v2_lite": Case(
        config=transformers.DeepseekV2Config,
        sizes={
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
        },
        seed=1,
        off={
            "router": zeroed(r"mlp\.gate\.weight"),
            "experts of their own": same_experts,
            "shared experts": zeroed(r"shared_experts\.down_proj"),
            "layer without experts": zeroed(r"layers\.0\.mlp\.down_proj"),
            "norm of latents": without(r"kv_a_layernorm$"),
            "shared part of keys": zeroed(r"kv_a_proj_with_mqa", slice(16, None)),
            "rope": NO_ROPE,
        },
    ),
    "deepseek_v2": Case(
        config=transformers.DeepseekV2Config,
        sizes={
            **DEEPSEEK,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN,
        },
        seed=2,
        off={
            "groups": reconfigured(topk_method="greedy"),
            "scale of experts": reconfigured(routed_scaling_factor=1.0),
            "norm of queries": without(r"q_a_layernorm$"),
            "rope scaling": reconfigured(
                rope_parameters={"rope_type": "default", "rope_theta": 50.0}
            ),
            "magnitude of logits": reconfigured(rope_parameters={**YARN, "mscale_all_dim": 0.3}),
            "rope": NO_ROPE,
        },
    ),
    "deepseek_v3": Case(
        config=transformers.DeepseekV3Config,
        sizes={
            **DEEPSEEK,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_mtp_layers": 0,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN,
        },
        seed=6,
        off={
            "bias of the choice": zeroed(r"e_score_correction_bias"),
            "groups": reconfigured(n_group=1, topk_group=1),
            "weights that sum to 1": reconfigured(norm_topk_prob=False),
            "neighbours turn": reconfigured(rope_interleave=False),
            "rope scaling": reconfigured(
                rope_parameters={"rope_type": "default", "rope_theta": 50.0}
            ),
            "shared experts": zeroed(r"shared_experts\.down_proj"),
            "rope": NO_ROPE,
        },
    ),
    "olmoe": Case(
        config=transformers.OlmoeConfig,
        sizes={
            **LLAMA,
            "intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "pad_token_id": None,
        },
        seed=2,
        off={
            "router": zeroed(r"mlp\.gate\.weight"),
            "weights as they are": reconfigured(norm_topk_prob=True),
            "experts of their own": same_experts,
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "scales of each head": rolled(r"[qk]_norm\.weight", 8),
            "rope": NO_ROPE,
        },
    ),
    "gpt_oss": Case(
        config=transformers.GptOssConfig,
        sizes={
            **LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        seed=3,
        off={
            "router": zeroed(r"mlp\.router\.weight"),
            "router bias": zeroed(r"mlp\.router\.bias"),
            "two choices": reconfigured(num_experts_per_tok=1),
            "experts of their own": same_experts,
            "gate bias and up bias": zeroed(r"gate_up_proj_bias"),
            "gates between": rolled(r"gate_up_proj$", 1, -1),
            "down bias": zeroed(r"down_proj_bias"),
            "sinks": replaced(r"sinks", lambda tensor: tensor - 1e4),
            "window": reconfigured(sliding_window=40),
            "window of one more": reconfigured(sliding_window=10),
            "attention bias": zeroed(r"self_attn\.[qkvo]_proj\.bias"),
            "rope": NO_ROPE,
        },
    ),
    "llama4_text": Case(
        config=transformers.Llama4TextConfig,
        sizes={
            **LLAMA,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 10,
            "floor_scale": 6,
            "attn_scale": 0.3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        seed=2,
        off={
            "router": zeroed(r"feed_forward\.router\.weight"),
            "shared expert": zeroed(r"shared_expert\.down_proj"),
            "experts of their own": same_experts,
            "chunk": reconfigured(attention_chunk_size=40),
            "chunk of one more": reconfigured(attention_chunk_size=11),
            "qk norm": without(r"self_attn\.qk_norm$"),
            "query growth": reconfigured(attn_temperature_tuning=False),
            "rope": NO_ROPE,
        },
    ),
    "gpt2": Case(
        config=transformers.GPT2Config,
        sizes={**GPT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        seed=27,
        off={
            "positions": zeroed(r"wpe\.weight"),
            "attention bias": zeroed(r"attn\.c_(attn|proj)\.bias"),
            "mlp bias": zeroed(r"mlp\.c_(fc|proj)\.bias"),
            "norm bias": zeroed(r"ln_.\.bias"),
            "weights stored [in, out]": replaced(r"attn\.c_proj\.weight", lambda tensor: tensor.T),
            "tied head": TIED_OFF,
            "gelu": reconfigured(activation_function="relu"),
            "gelu by tanh": reconfigured(activation_function="gelu"),
        },
    ),
    "opt": Case(
        config=transformers.OPTConfig,
        sizes={
            **GPT,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 80,
            "max_position_embeddings": 62,
            "pad_token_id": 1,
        },
        seed=8,
        off={
            "position offset": rolled(r"embed_positions\.weight", 2),
            "positions": zeroed(r"embed_positions\.weight"),
            "attention bias": zeroed(r"(q|k|v|out)_proj\.bias"),
            "mlp bias": zeroed(r"fc[12]\.bias"),
            "relu": reconfigured(activation_function="gelu"),
            "tied head": TIED_OFF,
            "norm first": norm_last,
        },
    ),
    "bloom": Case(
        config=transformers.BloomConfig,
        sizes={**GPT, "hidden_size": 48, "n_layer": 2, "n_head": 6},
        seed=599,
        off={
            "alibi": no_alibi,
            "embedding norm": without(r"word_embeddings_layernorm$"),
            "interleaved qkv": split_in_thirds(6),
            "attention bias": zeroed(r"self_attention\.\w+\.bias"),
            "mlp bias": zeroed(r"mlp\.dense\w+\.bias"),
            "tied head": TIED_OFF,
        },
    ),
}


def build(config_class: type, config: Any) -> Model:
    """A model of the configuration, in float32, with attention and experts written out."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def draw_weights(model: Model, seed: int) -> None:
    """Weights that make every part of the model count; the same on every machine."""
    # RandomState's streams are frozen, unlike those of torch and of np.random.Generator.
    random = np.random.RandomState(seed)
    tied = model.config.tie_word_embeddings
    for name, parameter in sorted(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        noise = random.standard_normal(tuple(parameter.shape))
        values = scaled(owner, name, noise, tied=tied)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            noise = 0.2 * random.standard_normal(tuple(buffer.shape))
            buffer.copy_(torch.from_numpy(noise.astype(np.float32)))


def scaled(owner: nn.Module, name: str, noise: np.ndarray, *, tied: bool) -> np.ndarray:
    """Unit noise turned into a parameter of `owner`.

    Matrices enlarge what they get and embeddings are small, so that layers outweigh the residual;
    else a tied head would repeat the last token for ever.
    """
    if isinstance(owner, nn.Embedding):
        return noise * (0.25 if tied else 0.8)
    if noise.ndim == 1 and name.endswith("weight"):
        return (1 + 0.3 * noise) * (0.4 if "embeddings_layernorm" in name else 1.0)
    if noise.ndim == 1:
        return 0.2 * noise
    fan_in = noise.shape[0] if isinstance(owner, Conv1D) else noise.shape[-1]
    # Sharper attention and larger logits than these would only enlarge rounding.
    gain = (
        1.2
        if re.search(r"[qk]_proj|(q|kv)_[ab]_proj|c_attn|query_key_value|lm_head", name)
        else 1.8
    )
    return noise * gain / np.sqrt(fan_in)


def logits_of(model: Model, ids: np.ndarray) -> np.ndarray:
    """Logits `[b, s, vocab]`."""
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.numpy()


def greedy_tokens(model: Model, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """Tokens `generate` adds to the prompt, and by how much each was the best at least."""
    tokens = torch.from_numpy(prompt).long()[None]
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
    )[0].numpy()
    new = out[len(prompt) :].astype(np.int32)
    steps = logits_of(model, out[None, :-1])[0, len(prompt) - 1 :]
    if not np.array_equal(steps.argmax(-1), new):
        raise Mismatch("generate with its cache and the plain forward pass choose other tokens")
    best = np.sort(steps, axis=-1)
    return new, float((best[:, -1] - best[:, -2]).min())


def make(case: Case, folder: Path) -> dict[str, Any]:
    """Write one case into `folder`; returns its entry of golden.json.

    Raises:
        Mismatch: Logits are too small or too indifferent to a feature.
    """
    torch.manual_seed(case.seed)
    model = build(case.config, case.config(**case.sizes))
    draw_weights(model, case.seed)
    random = np.random.RandomState(100 + case.seed)
    ids = random.randint(0, case.sizes["vocab_size"], (2, SEQ)).astype(np.int32)
    logits = logits_of(model, ids)
    greedy, margin = greedy_tokens(model, ids[0, :PROMPT])
    facts = {
        "seed": case.seed,
        "model_type": model.config.model_type,
        "logits_std": round(float(logits.std()), 4),
        "greedy_margin": round(margin, 5),
        "greedy_distinct": len(set(greedy.tolist())),
        "rounding": float(f"{rounding_of(model, ids, logits):.2g}"),
        "moved": {name: moved_by(edit, model, ids, logits) for name, edit in case.off.items()},
    }
    require(facts)
    save(model, case, folder)
    tensors = {"input_ids": ids, "logits": logits, "prompt": ids[0, :PROMPT], "greedy": greedy}
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "expected.safetensors"
    )
    return facts


def moved_by(edit: Edit, model: Model, ids: np.ndarray, logits: np.ndarray) -> float:
    """Largest change of a logit when a feature is switched off."""
    return round(float(np.abs(logits_of(edit(copy.deepcopy(model)), ids) - logits).max()), 4)


def rounding_of(model: Model, ids: np.ndarray, logits: np.ndarray) -> float:
    """Largest change of a logit in float64: how far two right answers may be apart."""
    return float(np.abs(logits_of(copy.deepcopy(model).double(), ids) - logits).max())


def require(facts: dict[str, Any]) -> None:
    """Refuse a case that could not tell right from wrong."""
    least = {name: MIN_MOVED_FAINT if name in FAINT else MIN_MOVED for name in facts["moved"]}
    weak = [name for name, by in facts["moved"].items() if by <= least[name]]
    dull = facts["greedy_margin"] < MIN_MARGIN or facts["greedy_distinct"] < MIN_DISTINCT
    if weak or dull or facts["logits_std"] < MIN_STD or facts["rounding"] > MAX_ROUNDING:
        raise Mismatch(f"too weak to be a test: {facts}")


def save(model: Model, case: Case, folder: Path) -> None:
    """config.json and weights as `transformers` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:
        old.unlink()
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a folder, whatever files they are in."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def compare(old: Path, new: Path) -> None:
    """Refuse committed files that the installed `transformers` does not give again."""
    mine, theirs = weights_of(old), weights_of(new)
    if mine.keys() != theirs.keys():
        raise Mismatch(f"{old.name}: other weights: {sorted(mine.keys() ^ theirs.keys())}")
    for name, value in mine.items():
        if not np.array_equal(value, theirs[name]):
            raise Mismatch(f"{old.name}: weight {name} differs")
    mine, theirs = (load_file(folder / "expected.safetensors") for folder in (old, new))
    for name in ("input_ids", "prompt", "greedy"):
        if not np.array_equal(mine[name], theirs[name]):
            raise Mismatch(f"{old.name}: {name} differ: {mine[name]} and {theirs[name]}")
    difference = float(np.abs(mine["logits"] - theirs["logits"]).max())
    if not difference <= LOGITS_TOLERANCE:
        raise Mismatch(f"{old.name}: logits differ by {difference}")


def check_export(folder: Path, scratch: Path, *, shards: bool) -> float:
    """Import with colossax, export, read back with `transformers`: largest change of a logit."""
    from colossax.models.hf import export_checkpoint, import_checkpoint

    import_checkpoint(folder, scratch / "checkpoint")
    max_bytes = 50_000 if shards else 5_000_000_000
    export_checkpoint(scratch / "checkpoint", scratch / "export", max_shard_bytes=max_bytes)
    if shards != (len(list((scratch / "export").glob("*.safetensors"))) > 1):
        raise Mismatch(f"{folder.name}: the export has another number of files than was asked for")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        scratch / "export",
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise Mismatch(f"{folder.name}: transformers loads the export with {wrong}")
    expected = load_file(folder / "expected.safetensors")
    difference = float(
        np.abs(logits_of(model.eval(), expected["input_ids"]) - expected["logits"]).max()
    )
    if not difference <= EXPORT_TOLERANCE:
        raise Mismatch(f"{folder.name}: logits of the export differ by {difference}")
    return difference


def regenerate(target: Path) -> None:
    """Write all cases and golden.json into `target`."""
    cases = {}
    for name, case in CASES.items():
        try:
            cases[name] = make(case, target / name)
        except Mismatch as problem:
            raise Mismatch(f"{name}: {problem}") from problem
        say(f"{name}: {cases[name]}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = json.dumps({"made_with": versions, "cases": cases}, indent=1)
    (target / "golden.json").write_text(text + "\n")


def check() -> None:
    """Compare the committed files with new ones, then every export with its original."""
    with tempfile.TemporaryDirectory() as scratch:
        regenerate(Path(scratch))
        for name in CASES:
            compare(HERE / name, Path(scratch) / name)
            say(f"{name}: the committed files are what transformers gives")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            shards = case.max_shard_size != Case.max_shard_size
            difference = check_export(HERE / name, Path(scratch), shards=shards)
        say(f"{name}: transformers reads the export, logits within {difference:.1e}")


def say(line: str) -> None:
    """One line to standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        check() if arguments.check else regenerate(HERE)
    except Mismatch as problem:
        sys.exit(f"golden files: {problem}")


if __name__ == "__main__":
    main()
