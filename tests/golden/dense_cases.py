"""Golden cases of dense decoders whose mathematics differs from Llama's and GPT-2's."""

from typing import Any

import transformers
from cases import LLAMA, NO_ROPE, OTHER_THETA, SCALED, TIED_OFF
from edits import Case, Edit, Model, reconfigured, replaced, rolled, without, zeroed

ROPE = {"rope_type": "default", "rope_theta": 100.0}


def own_rope(**changes: Any) -> Edit:
    """With other rope settings, the whole of them given."""
    return reconfigured(rope_parameters={**ROPE, **changes})


def scales_as_they_are(model: Model) -> Model:
    """A Gemma whose norms multiply by their parameter, not by 1 + it."""
    return replaced(r"norm\.weight", lambda tensor: tensor - 1)(model)


def one_scale(model: Model) -> Model:
    """A model whose embeddings are taken as they are."""
    model.model.embed_tokens.embed_scale.fill_(1.0)
    return model


def in_sequence(model: Model) -> Model:
    """A model whose MLP reads what attention added to."""
    return reconfigured(use_parallel_residual=False)(model)


GEMMA = {
    **LLAMA,
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 4.0,
    "attn_logit_softcapping": 3.0,
}
GEMMA_OFF = {
    "scale of scores": reconfigured(query_pre_attn_scalar=16),
    "bound of logits": reconfigured(final_logit_softcapping=None),
    "window": reconfigured(sliding_window=40),
    "window of one more": reconfigured(sliding_window=10),
    "scale from one": scales_as_they_are,
    "scale of embeddings": one_scale,
    "norm of outputs": without(r"post_attention_layernorm$"),
    "gelu": reconfigured(hidden_activation="silu"),
    "tied head": TIED_OFF,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.2],
    "long_factor": [1.5, 3.0],
    "original_max_position_embeddings": 10,
}
NEOX = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": ROPE,
}

DENSE: dict[str, Case] = {
    "gemma2": Case(
        config=transformers.Gemma2Config,
        sizes={**GEMMA, "rope_parameters": ROPE},
        seed=2,
        off={**GEMMA_OFF, "bound of scores": reconfigured(attn_logit_softcapping=None)},
    ),
    "gemma3": Case(
        config=transformers.Gemma3TextConfig,
        sizes={
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {**ROPE, "rope_type": "linear", "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        seed=3,
        off={
            **{k: v for k, v in GEMMA_OFF.items() if k != "bound of logits"},
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "rope of windows": zeroed(r"sliding_attention_inv_freq"),
            "rope": zeroed(r"full_attention_inv_freq"),
        },
    ),
    "olmo2": Case(
        config=transformers.Olmo2Config,
        sizes={**LLAMA, "rope_parameters": ROPE, "pad_token_id": None},
        seed=1,
        off={
            "norm of outputs": without(r"post_attention_layernorm$"),
            "norm of the MLP's": without(r"post_feedforward_layernorm$"),
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "scales of each head": rolled(r"[qk]_norm\.weight", 8),
            "rope": NO_ROPE,
        },
    ),
    "smollm3": Case(
        config=transformers.SmolLM3Config,
        sizes={
            **LLAMA,
            "no_rope_layer_interval": 2,
            "rope_parameters": ROPE,
            "pad_token_id": None,
        },
        seed=3,
        off={
            "layers without rope": reconfigured(no_rope_layers=[1, 1]),
            "rope": NO_ROPE,
            "tied head": TIED_OFF,
        },
    ),
    "starcoder2": Case(
        config=transformers.Starcoder2Config,
        sizes={**LLAMA, "sliding_window": 9, "rope_parameters": ROPE},
        seed=12,
        off={
            "window of one more": reconfigured(sliding_window=10),
            "attention bias": zeroed(r"self_attn\.[qkvo]_proj\.bias"),
            "mlp bias": zeroed(r"mlp\.c_(fc|proj)\.bias"),
            "norm bias": zeroed(r"(layernorm|norm)\.bias"),
            "gelu by tanh": reconfigured(hidden_act="gelu"),
            "tied head": TIED_OFF,
            "rope": NO_ROPE,
        },
    ),
    "phi3": Case(
        config=transformers.Phi3Config,
        sizes={
            **LLAMA,
            "sliding_window": 9,
            "pad_token_id": 0,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75},
            "hidden_size": 64,
        },
        seed=7,
        off={
            "window of one more": reconfigured(sliding_window=10),
            "part that turns": own_rope(partial_rotary_factor=0.5),
            "queries first": rolled(r"qkv_proj\.weight", 16),
            "gate first": rolled(r"gate_up_proj\.weight", 56),
            "rope": NO_ROPE,
        },
    ),
    "phi3_long": Case(
        config=transformers.Phi3Config,
        sizes={
            **LLAMA,
            "pad_token_id": 0,
            "original_max_position_embeddings": 10,
            "rope_parameters": {**LONG, "partial_rotary_factor": 0.5},
        },
        seed=23,
        off={
            "divisors of long rows": reconfigured(
                rope_parameters={**LONG, "long_factor": [1.5, 1.5], "partial_rotary_factor": 0.5}
            ),
            "magnitude": reconfigured(
                rope_parameters={**LONG, "attention_factor": 1.0, "partial_rotary_factor": 0.5}
            ),
        },
    ),
    "gpt_neox": Case(
        config=transformers.GPTNeoXConfig,
        sizes={**NEOX, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        seed=3,
        off={
            "side by side": in_sequence,
            "part that turns": own_rope(partial_rotary_factor=1.0),
            "attention bias": zeroed(r"attention\.\w+\.bias"),
            "mlp bias": zeroed(r"mlp\.dense\w+\.bias"),
            "norm of the MLP": rolled(r"post_attention_layernorm\.weight", 1),
            "gelu": reconfigured(hidden_act="relu"),
            "rope": NO_ROPE,
        },
    ),
    "gpt_neox_in_sequence": Case(
        config=transformers.GPTNeoXConfig,
        sizes={
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
        seed=21,
        off={
            "one after another": reconfigured(use_parallel_residual=True),
            "tied head": TIED_OFF,
            "rope": NO_ROPE,
        },
    ),
    "gptj": Case(
        config=transformers.GPTJConfig,
        sizes={
            "vocab_size": 128,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        seed=2,
        off={
            "head bias": zeroed(r"lm_head\.bias"),
            "mlp bias": zeroed(r"mlp\.fc_(in|out)\.bias"),
            "norm bias": zeroed(r"ln_\w\.bias"),
            "part that turns": reconfigured(rotary_dim=8),
            "positions": zeroed(r"embed_positions"),
        },
    ),
    "falcon": Case(
        config=transformers.FalconConfig,
        sizes=FALCON,
        seed=3,
        off={
            "queries first": rolled(r"query_key_value\.weight", 8),
            "keys before values": rolled(r"query_key_value\.weight", 40),
            "norm bias": zeroed(r"layernorm\.bias"),
            "gelu by tanh": reconfigured(activation="gelu_pytorch_tanh"),
            "tied head": TIED_OFF,
            "rope": NO_ROPE,
        },
    ),
    "falcon_grouped": Case(
        config=transformers.FalconConfig,
        sizes={**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        seed=11,
        off={
            "grouped queries": rolled(r"query_key_value\.weight", 8),
            "groups": rolled(r"query_key_value\.weight", 32),
            "two norms": rolled(r"ln_mlp\.weight", 1),
            "attention bias": zeroed(r"self_attention\.\w+\.bias"),
            "mlp bias": zeroed(r"mlp\.dense\w+\.bias"),
            "rope": NO_ROPE,
        },
    ),
    "falcon_alibi": Case(
        config=transformers.FalconConfig,
        sizes={
            **FALCON,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "tie_word_embeddings": False,
        },
        attention="sdpa",  # written out, penalties are added twice
        seed=2,
        off={
            "alibi": reconfigured(alibi=False),
            "interleaved qkv": rolled(r"query_key_value\.weight", 8),
            "norm of the MLP": rolled(r"post_attention_layernorm\.weight", 1),
            "attention bias": zeroed(r"self_attention\.\w+\.bias"),
        },
    ),
    "cohere": Case(
        config=transformers.CohereConfig,
        sizes={**LLAMA, "use_qk_norm": True, "logit_scale": 1.5, "rope_parameters": ROPE},
        seed=1,
        off={
            "scale of logits": reconfigured(logit_scale=1.4),
            "qk norm": without(r"self_attn\.[qk]_norm$"),
            "scales of each head": rolled(r"[qk]_norm\.weight", 1),
            "rope": NO_ROPE,
            "tied head": TIED_OFF,
        },
    ),
    "glm": Case(
        config=transformers.GlmConfig,
        sizes={
            **LLAMA,
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        seed=1,
        off={
            "part that turns": own_rope(partial_rotary_factor=1.0),
            "qkv bias": zeroed(r"[qkv]_proj\.bias"),
            "gate first": rolled(r"gate_up_proj\.weight", 56),
            "rope": NO_ROPE,
        },
    ),
    "glm4": Case(
        config=transformers.Glm4Config,
        sizes={
            **LLAMA,
            "head_dim": 12,
            "pad_token_id": 0,
            "attention_bias": False,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        seed=1,
        off={
            "norm of outputs": without(r"post_self_attn_layernorm$"),
            "norm of the MLP's": without(r"post_mlp_layernorm$"),
            "rope": NO_ROPE,
        },
    ),
    "opt_350m": Case(
        config=transformers.OPTConfig,
        sizes={
            "vocab_size": 128,
            "hidden_size": 32,
            "word_embed_proj_dim": 20,
            "do_layer_norm_before": False,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 80,
            "max_position_embeddings": 62,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        seed=32,
        off={
            "position offset": rolled(r"embed_positions\.weight", 2),
            "projection in": rolled(r"project_in\.weight", 1),
            "projection out": rolled(r"project_out\.weight", 1),
            "norm of sums": rolled(r"layers\.\d+\.final_layer_norm\.weight", 1),
            "tied head": TIED_OFF,
        },
    ),
    "qwen2_window": Case(
        config=transformers.Qwen2Config,
        sizes={
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "original_max_position_embeddings": 48,
            },
        },
        seed=1,
        off={
            "window of one more": reconfigured(sliding_window=10),
            "first layers": reconfigured(layer_types=["sliding_attention"] * 2),
            "rope scaling": own_rope(rope_theta=50.0),
        },
    ),
    "llama_linear": Case(
        config=transformers.LlamaConfig,
        sizes={**LLAMA, "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
        seed=1,
        off={"rope scaling": own_rope(), "rope": NO_ROPE},
    ),
    "llama_dynamic": Case(
        config=transformers.LlamaConfig,
        sizes={
            **LLAMA,
            "max_position_embeddings": 16,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
        },
        seed=1,
        plain=False,
        off={"rope scaling": own_rope(), "base": own_rope(rope_type="dynamic", factor=3.0)},
    ),
    "mistral_nemo": Case(
        config=transformers.MistralConfig,
        sizes={
            **LLAMA,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "rope_parameters": SCALED,
        },
        seed=1,
        off={"rope scaling": own_rope(rope_theta=50.0), "rope": OTHER_THETA},
    ),
}
