"""OLMo 2's names and layouts in Hugging Face files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting
from colossax.models.gemma2.convert import SANDWICH
from colossax.models.llama.convert import IGNORED, SETTINGS
from colossax.models.olmo2.config import OLMo2Config
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import first_eos


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings), **first_eos(settings)}


def _write(config: OLMo2Config) -> dict[str, Any]:
    return {**write_rope(config.rope_theta, config.rope_scaling), "eos_token_id": config.eos}


def _of_all_heads(name: str) -> str:
    return "(heads head_dim)" if "q_norm" in name else "(kv_heads head_dim)"


CONVERSION = Conversion(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    config=OLMo2Config,
    settings=(*SETTINGS, setting("max_seq", "max_position_embeddings", default=2048)),
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    links=tuple(
        dataclasses.replace(entry, layout=_of_all_heads(entry.foreign))
        if entry.layout == "head_dim"
        else entry
        for entry in SANDWICH
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
