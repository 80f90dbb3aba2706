"""Gemma 3's names and layouts in Hugging Face files, of its text models."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Positive
from colossax.models.conversion import Conversion, setting
from colossax.models.gemma2.convert import GEMMA_SETTINGS, SANDWICH, read_full
from colossax.models.gemma3.config import Gemma3Config
from colossax.models.llama.convert import IGNORED
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import FULL, LOCAL, checked, first_eos, write_kinds

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _ropes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Both, which newer files hold by the type of layer."""
    rope = checked("rope_parameters", settings.get("rope_parameters"), dict | None) or {}
    if FULL not in rope and LOCAL not in rope:
        local = settings.get("rope_local_base_freq", _LOCAL_THETA)
        found = read_rope(settings, theta=_THETA)
        return {**found, "local_theta": checked("rope_local_base_freq", local, Positive)}
    plain = {**settings, "rope_scaling": None}
    of_kind = [{**plain, "rope_parameters": rope.get(kind)} for kind in (FULL, LOCAL)]
    local = read_rope(of_kind[1], theta=_LOCAL_THETA, allowed=("default",))
    return {**read_rope(of_kind[0], theta=_THETA), "local_theta": local["rope_theta"]}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**_ropes(settings), **read_full(settings, 6), **first_eos(settings)}


def _write(config: Gemma3Config) -> dict[str, Any]:
    full = write_rope(config.rope_theta, config.rope_scaling)
    local = write_rope(config.local_theta)
    both = {FULL: full.pop("rope_parameters"), LOCAL: local["rope_parameters"]}
    return {
        **full,
        "rope_parameters": both,
        "rope_local_base_freq": config.local_theta,
        "layer_types": write_kinds(config.decoder().sees_all),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=Gemma3Config,
    settings=(*GEMMA_SETTINGS, setting("max_seq", "max_position_embeddings", default=131_072)),
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (False, None),
    },
    links=SANDWICH,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
