"""BART's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Natural
from colossax.models.bart.config import BARTConfig
from colossax.models.conversion import Conversion, Link, link, setting
from colossax.models.settings import checked, first_eos, read_activation, write_activation


def map_links(foreign: str, ours: str, weight: str, bias: str) -> tuple[Link, Link]:
    """Of a map or a norm with a bias."""
    held = "scale" if weight == bias else "w"
    return (
        link(f"{foreign}.weight", weight, f"{ours}/{held}"),
        link(f"{foreign}.bias", bias, f"{ours}/{'bias' if held == 'scale' else 'b'}"),
    )


def attention_links(foreign: str, ours: str) -> tuple[Link, ...]:
    """Of an attention block, biases included."""
    of_heads = [
        one
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
        for one in map_links(
            f"{foreign}.{name}_proj",
            f"{ours}/{name}",
            f"({heads} head_dim) embed",
            f"({heads} head_dim)",
        )
    ]
    return (
        *of_heads,
        *map_links(f"{foreign}.out_proj", f"{ours}/o", "embed (heads head_dim)", "embed"),
    )


def stack_links(name: str, *, norm: str, cross: bool) -> tuple[Link, ...]:
    """Of a stack: positions, and layers whose norms stand as `norm` says, after `attn_` and others.

    Args:
        name: `encoder` or `decoder`.
        norm: `norm`, of inputs, or `sum_norm`.
        cross: Whether its layers read a source.
    """
    theirs, ours = f"model.{name}", f"{name}/layers"
    layer = f"{theirs}.layers.{{layer}}"
    blocks = [("self_attn", "attn"), *([("encoder_attn", "cross")] if cross else [])]
    return (
        link(f"{theirs}.embed_positions.weight", "positions embed", f"{name}/positions/table"),
        *(
            one
            for foreign, here in blocks
            for one in (
                *attention_links(f"{layer}.{foreign}", f"{ours}/{here}"),
                *map_links(
                    f"{layer}.{foreign}_layer_norm", f"{ours}/{here}_{norm}", "embed", "embed"
                ),
            )
        ),
        *map_links(f"{layer}.fc1", f"{ours}/mlp/up", "mlp embed", "mlp"),
        *map_links(f"{layer}.fc2", f"{ours}/mlp/down", "embed mlp", "embed"),
        *map_links(f"{layer}.final_layer_norm", f"{ours}/mlp_{norm}", "embed", "embed"),
    )


LINKS = (
    link("model.shared.weight", "vocab embed", "embed/table"),
    *(
        one
        for name in ("encoder", "decoder")
        for one in (
            *map_links(f"model.{name}.layernorm_embedding", f"{name}/embed_norm", "embed", "embed"),
            *stack_links(name, norm="sum_norm", cross=name == "decoder"),
        )
    ),
    link("final_logits_bias", "1 vocab", "head_bias"),
)


def read_tokens(settings: Mapping[str, Any], usual: int) -> dict[str, Any]:
    """First and last token of a text that is written."""
    name = "decoder_start_token_id"
    return {"start": checked(name, settings.get(name, usual), Natural), **first_eos(settings)}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    activation = read_activation(settings, "activation_function", "gelu")
    return {"activation": activation, **read_tokens(settings, 2)}


def _write(config: BARTConfig) -> dict[str, Any]:
    return {
        "activation_function": write_activation(config.activation),
        "decoder_start_token_id": config.start,
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    config=BARTConfig,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "d_model"),
        setting("layers", "encoder_layers"),
        setting("decoder_layers", "decoder_layers"),
        setting("heads", "encoder_attention_heads"),
        setting("decoder_heads", "decoder_attention_heads"),
        setting("mlp", "encoder_ffn_dim"),
        setting("decoder_mlp", "decoder_ffn_dim"),
        setting("max_seq", "max_position_embeddings", default=1024),
        setting("scaled", "scale_embedding", default=False),
        setting("init_std", "init_std", default=0.02),
    ),
    fixed={
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "tie_word_embeddings": (True,),
        "normalize_before": (False,),
        "add_final_layer_norm": (False,),
        "normalize_embedding": (True,),
    },
    forms={},
    links=LINKS,
    ignored=(r"model\.(encoder|decoder)\.embed_tokens\.weight",),
    read=_read,
    write=_write,
)
