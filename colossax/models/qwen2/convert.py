"""Qwen 2's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Count, Natural
from colossax.errors import InputError
from colossax.models.conversion import Conversion, setting
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.qwen2.config import Qwen2Config
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import FULL, LOCAL, checked, first_eos, per_layer, write_kinds


def read_window(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our `window` and `full_first`; Qwen 3's too.

    Raises:
        InputError: Layers that see all keys come after others.
    """
    kinds = per_layer(settings, "layer_types", (FULL, LOCAL))
    if not settings.get("use_sliding_window") and LOCAL not in (kinds or ()):
        return {"window": None, "full_first": 0}
    first = checked("max_window_layers", settings.get("max_window_layers", 28), Natural)
    if kinds is not None:
        first = kinds.index(LOCAL) if LOCAL in kinds else len(kinds)
        if FULL in kinds[first:]:
            raise InputError(
                f"config.json: layer_types with {FULL!r} after {LOCAL!r} are not supported; only"
                " first layers that see all keys are"
            )
    window = checked("sliding_window", settings.get("sliding_window", 4096), Count | None)
    return {"window": window, "full_first": first}


def write_window(config: Any) -> dict[str, Any]:
    """What the files say of it."""
    if config.window is None:
        return {"use_sliding_window": False, "layer_types": [FULL] * config.layers}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "max_window_layers": config.full_first,
        "layer_types": write_kinds(config.decoder().sees_all),
    }


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_rope(settings), **read_window(settings), **first_eos(settings)}


def _write(config: Qwen2Config) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        **write_window(config),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=Qwen2Config,
    settings=(
        *SETTINGS,
        setting("head_dim", "head_dim", default=None),
        setting("max_seq", "max_position_embeddings", default=32_768),
    ),
    fixed={"hidden_act": ("silu",)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
