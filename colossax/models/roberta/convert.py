"""RoBERTa's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Natural
from colossax.errors import InputError
from colossax.models.bert.convert import (
    FIXED,
    SETTINGS,
    forms,
    layer_links,
    read,
    transform_links,
    write,
)
from colossax.models.conversion import Conversion, link
from colossax.models.roberta.config import RoBERTaConfig
from colossax.models.settings import checked


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    pad = checked("pad_token_id", settings.get("pad_token_id", 1), Natural)
    rows = checked("max_position_embeddings", settings.get("max_position_embeddings"), Count)
    if rows <= pad + 1:
        raise InputError(
            f"config.json: 'max_position_embeddings' is {rows}, and positions begin behind"
            f" pad_token_id {pad}; give more than {pad + 1}"
        )
    return {"max_seq": rows - pad - 1, "pad": pad, **read(settings)}


def _write(config: RoBERTaConfig) -> dict[str, Any]:
    rows = config.max_seq + config.position_offset
    return {"max_position_embeddings": rows, "pad_token_id": config.pad, **write(config)}


CONVERSION = Conversion(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    config=RoBERTaConfig,
    settings=SETTINGS,
    fixed=FIXED,
    forms=forms("classifier.dense", "classifier.out_proj"),
    links=(
        *layer_links("roberta"),
        *transform_links("lm_head.dense", "lm_head.layer_norm"),
        link("lm_head.decoder.weight", "vocab embed", "head/w"),
        link("lm_head.bias", "vocab", "head_bias"),
    ),
    head="lm_head.decoder.weight",
    prefix="roberta.",
    ignored=(
        r"roberta\.embeddings\.position_ids",
        r"roberta\.pooler\..*",
        r"lm_head\.decoder\.bias",
    ),
    read=_read,
    write=_write,
)
