"""Golden cases of encoders, and of other heads than that of a vocabulary."""

from typing import Any

import transformers
from cases import LLAMA, NO_ROPE
from edits import Case, Edit, Model, reconfigured, rolled, without, zeroed

ROWS = transformers.AutoModelForSequenceClassification
TOKENS = transformers.AutoModelForTokenClassification
WORDS = transformers.AutoModelForMaskedLM
LABELS = {"num_labels": 5}

BERT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BERT_OFF = {
    "positions": zeroed(r"position_embeddings"),
    "norm of embeddings": without(r"embeddings\.LayerNorm$"),
    "norm of attention": without(r"attention\.output\.LayerNorm$"),
    "attention bias": zeroed(r"(query|key|value)\.bias"),
    "mlp bias": zeroed(r"intermediate\.dense\.bias"),
    "gelu": reconfigured(hidden_act="relu"),
}
MODERN = {
    **BERT,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}


def causal(model: Model) -> Model:
    """A model whose tokens see those before them alone."""
    return reconfigured(is_decoder=True)(model)


def pooled(kind: str) -> Edit:
    """A ModernBERT that pools otherwise."""
    return reconfigured(classifier_pooling=kind)


def moved_norm(model: Model) -> Model:
    """A ModernBERT whose first layer norms what attention reads."""
    layers: Any = model.model.layers
    layers[0].attn_norm = layers[1].attn_norm
    return model


ENCODERS: dict[str, Case] = {
    "bert": Case(
        config=transformers.BertConfig,
        sizes=BERT,
        auto=WORDS,
        seed=1,
        off={
            **BERT_OFF,
            "both sides": causal,
            "kinds of tokens": zeroed(r"token_type_embeddings"),
            "transform": without(r"predictions\.transform\.dense$"),
            "norm of the transform": without(r"predictions\.transform\.LayerNorm$"),
            "head bias": zeroed(r"predictions\.bias"),
        },
    ),
    "bert_rows": Case(
        config=transformers.BertConfig,
        sizes={**BERT, **LABELS},
        auto=ROWS,
        seed=3,
        off={
            "pooler": without(r"bert\.pooler\.dense$"),
            "tanh": without(r"bert\.pooler\.activation$"),
            "bias of classes": zeroed(r"classifier\.bias"),
        },
    ),
    "bert_tokens": Case(
        config=transformers.BertConfig,
        sizes={**BERT, **LABELS, "hidden_act": "gelu_pytorch_tanh"},
        auto=TOKENS,
        seed=1,
        off={"bias of classes": zeroed(r"classifier\.bias")},
    ),
    "roberta": Case(
        config=transformers.RobertaConfig,
        sizes={**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 3},
        auto=WORDS,
        seed=1,
        off={
            "positions behind padding": rolled(r"position_embeddings\.weight", 1),
            "transform": without(r"lm_head\.dense$"),
            "norm of the transform": without(r"lm_head\.layer_norm$"),
            "head bias": zeroed(r"lm_head\.bias"),
        },
    ),
    "roberta_rows": Case(
        config=transformers.RobertaConfig,
        sizes={**BERT, **LABELS, "type_vocab_size": 1},
        auto=ROWS,
        seed=1,
        off={
            "map before classes": without(r"classifier\.dense$"),
            "bias of classes": zeroed(r"classifier\.out_proj\.bias"),
        },
    ),
    "modernbert": Case(
        config=transformers.ModernBertConfig,
        sizes=MODERN,
        auto=WORDS,
        seed=24,
        off={
            "window": reconfigured(local_attention=80),
            "window of one more": reconfigured(local_attention=10),
            "full layers": reconfigured(layer_types=["sliding_attention"] * 3),
            "rope of windows": zeroed(r"sliding_attention_inv_freq"),
            "rope": zeroed(r"full_attention_inv_freq"),
            "gate first": rolled(r"mlp\.Wi\.weight", 56),
            "first layer without norm": moved_norm,
            "norm of embeddings": without(r"embeddings\.norm$"),
            "transform": without(r"head\.dense$"),
            "head bias": zeroed(r"decoder\.bias"),
            "gelu": reconfigured(hidden_activation="relu"),
        },
    ),
    "modernbert_rows": Case(
        config=transformers.ModernBertConfig,
        sizes={
            **MODERN,
            **LABELS,
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": None,
        },
        auto=ROWS,
        seed=1,
        off={
            "mean": pooled("cls"),
            "bias of the map": zeroed(r"head\.dense\.bias"),
            "norm bias": zeroed(r"norm\.bias"),
            "attention bias": zeroed(r"(Wqkv|Wo)\.bias"),
        },
    ),
    "llama_rows": Case(
        config=transformers.LlamaConfig,
        sizes={**LLAMA, **LABELS, "pad_token_id": 0},
        auto=ROWS,
        seed=8,
        off={"rope": NO_ROPE, "classes": rolled(r"score\.weight", 1)},
    ),
    "gpt2_tokens": Case(
        config=transformers.GPT2Config,
        sizes={
            "vocab_size": 128,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **LABELS,
        },
        auto=TOKENS,
        seed=9,
        off={"bias of classes": zeroed(r"classifier\.bias")},
    ),
}
