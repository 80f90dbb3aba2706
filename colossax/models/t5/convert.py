"""T5's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Natural
from colossax.models.conversion import Conversion, Link, link, setting
from colossax.models.settings import checked, first_eos, read_activation, write_activation
from colossax.models.t5.config import T5Config

_GATED = "gated-"


def _attention(foreign: str, ours: str) -> tuple[Link, ...]:
    return (
        *(
            link(f"{foreign}.{name}.weight", f"({heads} head_dim) embed", f"{ours}/{name}/w")
            for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
        ),
        link(f"{foreign}.o.weight", "embed (heads head_dim)", f"{ours}/o/w"),
    )


def _stack(name: str, sublayers: tuple[tuple[str, str], ...]) -> tuple[Link, ...]:
    """Of one stack, whose attention blocks are called so there and here."""
    layer, ours, last = f"{name}.block.{{layer}}.layer", f"{name}/layers", len(sublayers)
    mlp = f"{layer}.{last}.DenseReluDense"
    links = [
        link(
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "buckets heads",
            f"{name}/relative/table",
        )
    ]
    for at, (theirs, here) in enumerate(sublayers):
        links += _attention(f"{layer}.{at}.{theirs}", f"{ours}/{here}")
        links += [link(f"{layer}.{at}.layer_norm.weight", "embed", f"{ours}/{here}_norm/scale")]
    return (
        *links,
        link(f"{mlp}.wi.weight", "mlp embed", f"{ours}/mlp/up/w"),
        link(f"{mlp}.wi_0.weight", "mlp embed", f"{ours}/mlp/gate/w"),
        link(f"{mlp}.wi_1.weight", "mlp embed", f"{ours}/mlp/up/w"),
        link(f"{mlp}.wo.weight", "embed mlp", f"{ours}/mlp/down/w"),
        link(f"{layer}.{last}.layer_norm.weight", "embed", f"{ours}/mlp_norm/scale"),
        link(f"{name}.final_layer_norm.weight", "embed", f"{name}/norm/scale"),
    )


_SELF, _CROSS = ("SelfAttention", "attn"), ("EncDecAttention", "cross")

LINKS = (
    link("shared.weight", "vocab embed", "embed/table"),
    *_stack("encoder", (_SELF,)),
    *_stack("decoder", (_SELF, _CROSS)),
    link("lm_head.weight", "vocab embed", "head/w"),
)


def _links(config: T5Config) -> tuple[Link, ...]:
    """Those of an MLP with a gate, or without."""
    other = (".wi.",) if config.gated else (".wi_0.", ".wi_1.")
    return tuple(one for one in LINKS if not any(name in one.foreign for name in other))


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    name = "feed_forward_proj"
    said = checked(name, settings.get(name, "relu"), str)
    gated, kind = said.startswith(_GATED), said.removeprefix(_GATED)
    # As the family has it: the gate of T5 1.1 is GELU by tanh, whatever the file calls it.
    kind = "gelu_new" if gated and kind == "gelu" else kind
    start = settings.get("decoder_start_token_id")
    start = settings.get("pad_token_id", 0) if start is None else start
    scaled = settings.get("scale_decoder_outputs")
    return {
        "gated": gated,
        "activation": read_activation({name: kind}, name, "relu"),
        "start": checked("decoder_start_token_id", start, Natural),
        "tied": settings.get("tie_word_embeddings", True) is not False
        if scaled is None
        else scaled,
        **first_eos(settings),
    }


def _write(config: T5Config) -> dict[str, Any]:
    kind = write_activation(config.activation)
    kind = "gelu" if config.gated and config.activation == "gelu_tanh" else kind
    return {
        "feed_forward_proj": (_GATED if config.gated else "") + kind,
        "decoder_start_token_id": config.start,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.tied,
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    config=T5Config,
    settings=(
        setting("vocab", "vocab_size"),
        setting("embed", "d_model"),
        setting("layers", "num_layers"),
        setting("decoder_layers", "num_decoder_layers", default=lambda s: s["num_layers"]),
        setting("heads", "num_heads"),
        setting("head_dim", "d_kv"),
        setting("mlp", "d_ff"),
        setting("max_seq", "n_positions", default=512),
        setting("buckets", "relative_attention_num_buckets", default=32),
        setting("farthest", "relative_attention_max_distance", default=128),
        setting("norm_eps", "layer_norm_epsilon", default=1e-6),
    ),
    fixed={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    forms={},
    links=LINKS,
    links_of=_links,
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    read=_read,
    write=_write,
)
