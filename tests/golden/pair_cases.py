"""Golden cases of encoder-decoders."""

import copy

import transformers
from edits import Case, Edit, Model, reconfigured, rolled, without, zeroed
from torch import nn

PAIRS = transformers.AutoModelForSeq2SeqLM

T5 = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 56,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "n_positions": 96,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
T5_OFF: dict[str, Edit] = {
    "distances in the encoder": zeroed(r"encoder.*relative_attention_bias"),
    "distances in the decoder": zeroed(r"decoder.*relative_attention_bias"),
    "buckets": rolled(r"encoder.*relative_attention_bias", 1),
    "keys behind": rolled(r"encoder.*relative_attention_bias", 4),
    "farthest": reconfigured(relative_attention_max_distance=12),
    "norm of the source": without(r"encoder\.final_layer_norm$"),
    "norm of cross-attention": without(r"decoder\.block\.\d\.layer\.1\.layer_norm$"),
    "cross-attention": zeroed(r"EncDecAttention\.o\.weight"),
}


BART = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "forced_eos_token_id": None,
}


def with_head(model: Model) -> Model:
    """T5 1.1: a head of its own, which `transformers` makes of weights that hold one."""
    model.lm_head.weight = nn.Parameter(model.shared.weight.detach().clone())
    return model


def unscaled(model: Model) -> Model:
    """A BART whose embeddings are taken as they are."""
    model = copy.deepcopy(model)
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_tokens.embed_scale = 1.0
    return model


ENCODER_DECODERS: dict[str, Case] = {
    "t5": Case(
        config=transformers.T5Config,
        sizes=T5,
        auto=PAIRS,
        seed=8,
        off={**T5_OFF, "relu": reconfigured(dense_act_fn="gelu_new")},
    ),
    "t5_gated": Case(
        config=transformers.T5Config,
        sizes={**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        auto=PAIRS,
        seed=18,
        made=with_head,
        off={"gate": reconfigured(dense_act_fn="relu"), "own head": rolled(r"lm_head", 1)},
    ),
    "bart": Case(
        config=transformers.BartConfig,
        sizes=BART,
        auto=PAIRS,
        seed=2,
        off={
            "positions": zeroed(r"embed_positions"),
            "position offset": rolled(r"decoder\.embed_positions", 1),
            "norm of embeddings": without(r"encoder\.layernorm_embedding$"),
            "scale of embeddings": unscaled,
            "head bias": zeroed(r"final_logits_bias"),
            "cross-attention": zeroed(r"encoder_attn\.out_proj"),
            "norm of cross-attention": without(r"encoder_attn_layer_norm$"),
            "activation": reconfigured(activation_function="relu"),
        },
    ),
}
