"""Golden cases of models that read sound."""

import transformers
from edits import Case, reconfigured, replaced, rolled, without, zeroed

SPEECH = transformers.AutoModelForSpeechSeq2Seq

WHISPER = {
    "vocab_size": 128,
    "num_mel_bins": 10,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 48,
    "max_source_positions": 24,
    "max_target_positions": 48,
    "decoder_start_token_id": 2,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

SOUND: dict[str, Case] = {
    "whisper": Case(
        config=transformers.WhisperConfig,
        sizes=WHISPER,
        auto=SPEECH,
        seed=3,
        off={
            "frames in order": replaced(r"conv1\.weight", lambda kernel: kernel.flip(-1)),
            "tokens of two frames in order": replaced(
                r"conv2\.weight", lambda kernel: kernel.flip(-1)
            ),
            "mels": rolled(r"conv1\.weight", 1, 1),
            "bias of the first convolution": zeroed(r"conv1\.bias"),
            "bias of the second convolution": zeroed(r"conv2\.bias"),
            "sines": zeroed(r"encoder\.embed_positions"),
            "positions": zeroed(r"decoder\.embed_positions"),
            "query bias": zeroed(r"q_proj\.bias"),
            "value bias": zeroed(r"v_proj\.bias"),
            "output bias": zeroed(r"out_proj\.bias"),
            "mlp bias": zeroed(r"fc[12]\.bias"),
            "norm before attention": without(r"self_attn_layer_norm$"),
            "norm of the source": without(r"encoder\.layer_norm$"),
            "last norm": without(r"decoder\.layer_norm$"),
            "cross-attention": zeroed(r"encoder_attn\.out_proj"),
            "activation": reconfigured(activation_function="relu"),
        },
    ),
}
