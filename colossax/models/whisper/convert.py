"""Whisper's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.bart.convert import map_links, read_tokens, stack_links
from colossax.models.conversion import Conversion, link, setting
from colossax.models.settings import read_activation, write_activation
from colossax.models.whisper.config import WhisperConfig

LINKS = (
    link("model.decoder.embed_tokens.weight", "vocab embed", "embed/table"),
    *map_links("model.encoder.conv1", "frames/first", "mlp mels kernel", "mlp"),
    *map_links("model.encoder.conv2", "frames/second", "embed mlp kernel", "embed"),
    *(
        one
        for name in ("encoder", "decoder")
        for one in (
            *stack_links(name, norm="norm", cross=name == "decoder"),
            *map_links(f"model.{name}.layer_norm", f"{name}/norm", "embed", "embed"),
        )
    ),
)


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    activation = read_activation(settings, "activation_function", "gelu")
    return {"activation": activation, **read_tokens(settings, WhisperConfig.start)}


def _write(config: WhisperConfig) -> dict[str, Any]:
    # Without them `transformers` takes numbers of large vocabularies; published ones are that.
    names = () if config.eos is None else ("bos_token_id", "pad_token_id")
    return {
        "activation_function": write_activation(config.activation),
        "decoder_start_token_id": config.start,
        "eos_token_id": config.eos,
        **dict.fromkeys(names, config.eos),
    }


CONVERSION = Conversion(
    model_type="whisper",
    architecture="WhisperForConditionalGeneration",
    config=WhisperConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "d_model"),
        setting("layers", "encoder_layers"),
        setting("decoder_layers", "decoder_layers"),
        setting("heads", "encoder_attention_heads"),
        setting("decoder_heads", "decoder_attention_heads"),
        setting("mlp", "encoder_ffn_dim"),
        setting("decoder_mlp", "decoder_ffn_dim"),
        setting("mels", "num_mel_bins", default=80),
        setting("max_source", "max_source_positions", default=1500),
        setting("max_seq", "max_target_positions", default=448),
        setting("init_std", "init_std", default=0.02),
    ),
    fixed={
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "tie_word_embeddings": (True,),
        "scale_embedding": (False,),
        "apply_spec_augment": (False,),
    },
    forms={},
    links=LINKS,
    head="proj_out.weight",
    read=_read,
    write=_write,
)
