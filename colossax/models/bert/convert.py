"""BERT's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.bert.config import BERTConfig
from colossax.models.conversion import Conversion, link, setting
from colossax.models.settings import (
    ROWS,
    TOKENS,
    Form,
    first_eos,
    read_activation,
    write_activation,
)
from colossax.nn.config import HeadConfig, TransformConfig


def layer_links(base: str) -> tuple:
    """Tensors of embeddings and layers; those of RoBERTa too, whose base is another."""
    layer, embeddings = f"{base}.encoder.layer.{{layer}}", f"{base}.embeddings"
    attention = f"{layer}.attention"
    return (
        link(f"{embeddings}.word_embeddings.weight", "vocab embed", "embed/table"),
        link(f"{embeddings}.position_embeddings.weight", "positions embed", "positions/table"),
        link(
            f"{embeddings}.token_type_embeddings.weight", "token_types embed", "token_types/table"
        ),
        link(f"{embeddings}.LayerNorm.weight", "embed", "embed_norm/scale"),
        link(f"{embeddings}.LayerNorm.bias", "embed", "embed_norm/bias"),
        link(f"{attention}.self.query.weight", "(heads head_dim) embed", "layers/attn/q/w"),
        link(f"{attention}.self.query.bias", "(heads head_dim)", "layers/attn/q/b"),
        link(f"{attention}.self.key.weight", "(kv_heads head_dim) embed", "layers/attn/k/w"),
        link(f"{attention}.self.key.bias", "(kv_heads head_dim)", "layers/attn/k/b"),
        link(f"{attention}.self.value.weight", "(kv_heads head_dim) embed", "layers/attn/v/w"),
        link(f"{attention}.self.value.bias", "(kv_heads head_dim)", "layers/attn/v/b"),
        link(f"{attention}.output.dense.weight", "embed (heads head_dim)", "layers/attn/o/w"),
        link(f"{attention}.output.dense.bias", "embed", "layers/attn/o/b"),
        link(f"{attention}.output.LayerNorm.weight", "embed", "layers/attn_sum_norm/scale"),
        link(f"{attention}.output.LayerNorm.bias", "embed", "layers/attn_sum_norm/bias"),
        link(f"{layer}.intermediate.dense.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{layer}.intermediate.dense.bias", "mlp", "layers/mlp/up/b"),
        link(f"{layer}.output.dense.weight", "embed mlp", "layers/mlp/down/w"),
        link(f"{layer}.output.dense.bias", "embed", "layers/mlp/down/b"),
        link(f"{layer}.output.LayerNorm.weight", "embed", "layers/mlp_sum_norm/scale"),
        link(f"{layer}.output.LayerNorm.bias", "embed", "layers/mlp_sum_norm/bias"),
    )


def transform_links(dense: str, norm: str, where: str = "transform") -> tuple:
    """Tensors of a transform: of its map and of its norm."""
    return (
        link(f"{dense}.weight", "width embed", f"{where}/map/w"),
        link(f"{dense}.bias", "width", f"{where}/map/b"),
        link(f"{norm}.weight", "embed", f"{where}/norm/scale"),
        link(f"{norm}.bias", "embed", f"{where}/norm/bias"),
    )


def forms(dense: str, last: str) -> dict[str, Form]:
    """Classes: of the first token behind a map and tanh, or of each token.

    Args:
        dense: Name of that map.
        last: Name of the map to classes behind it.
    """

    def of(last: str) -> tuple:
        return (
            *transform_links(dense, "none", "answers/transform")[:2],
            link(f"{last}.weight", "outputs embed", "answers/map/w"),
            link(f"{last}.bias", "outputs", "answers/map/b"),
        )

    tanh = TransformConfig(activation="tanh", norm=False)
    return {
        ROWS: Form(
            head=lambda _, outputs: HeadConfig(outputs=outputs, pool="first", transform=tanh),
            links=of(last),
        ),
        TOKENS: Form(head=lambda _, outputs: HeadConfig(outputs=outputs), links=of("classifier")),
    }


SETTINGS = (
    setting("vocab", "vocab_size"),
    setting("embed", "hidden_size"),
    setting("layers", "num_hidden_layers"),
    setting("heads", "num_attention_heads"),
    setting("mlp", "intermediate_size"),
    setting("norm_eps", "layer_norm_eps", default=1e-12),
    setting("tied", "tie_word_embeddings", default=True),
    setting("init_std", "initializer_range", default=0.02),
    setting("token_types", "type_vocab_size", default=2),
)
"""RoBERTa's too."""

FIXED = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are no plain field."""
    return {"activation": read_activation(settings, "hidden_act", "gelu"), **first_eos(settings)}


def write(config: BERTConfig) -> dict[str, Any]:
    """Likewise, written."""
    return {"hidden_act": write_activation(config.activation), "eos_token_id": config.eos}


_HEAD = "cls.predictions"

CONVERSION = Conversion(
    model_type="bert",
    architecture="BertForMaskedLM",
    config=BERTConfig,
    settings=(*SETTINGS, setting("max_seq", "max_position_embeddings", default=512)),
    fixed=FIXED,
    forms=forms("bert.pooler.dense", "classifier"),
    links=(
        *layer_links("bert"),
        *transform_links(f"{_HEAD}.transform.dense", f"{_HEAD}.transform.LayerNorm"),
        link(f"{_HEAD}.decoder.weight", "vocab embed", "head/w"),
        link(f"{_HEAD}.bias", "vocab", "head_bias"),
    ),
    head=f"{_HEAD}.decoder.weight",
    prefix="bert.",
    spelt={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=(
        r"bert\.embeddings\.position_ids",
        r"bert\.pooler\..*",
        r"cls\.seq_relationship\..*",
        r"cls\.predictions\.decoder\.bias",
    ),
    read=read,
    write=write,
)
