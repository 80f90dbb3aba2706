"""SmolLM3's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, setting, settings_with
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import read_rope, write_rope
from colossax.models.settings import (
    every_full,
    first_eos,
    per_layer,
    unsupported_window,
    write_kinds,
)
from colossax.models.smollm3.config import SmolLM3Config


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    unsupported_window(settings)
    turned = per_layer(settings, "no_rope_layers", (0, 1))
    nope = settings.get("no_rope_layer_interval", 4)
    if turned is not None:
        without = [not one for one in turned]
        nope = every_full("no_rope_layers", without, "each so many-th as 0", "have no rope")
    return {
        **read_rope(settings, theta=2_000_000.0),
        "nope_every": nope,
        **first_eos(settings),
    }


def _write(config: SmolLM3Config) -> dict[str, Any]:
    nope = config.decoder().sees_all
    return {
        **write_rope(config.rope_theta, config.rope_scaling),
        "no_rope_layers": [int(not without) for without in nope],
        "no_rope_layer_interval": config.nope_every,
        "layer_types": write_kinds([True] * config.layers),
        "eos_token_id": config.eos,
        "pad_token_id": None,
    }


CONVERSION = Conversion(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    config=SmolLM3Config,
    settings=settings_with(
        SETTINGS,
        setting("tied", "tie_word_embeddings", default=True),
        setting("max_seq", "max_position_embeddings", default=32_768),
        setting("attention_bias", "attention_bias", default=False),
        setting("mlp_bias", "mlp_bias", default=False),
    ),
    fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    links=LINKS,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
