"""Gemma 2's names and layouts in Hugging Face files."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, link, setting, settings_with
from colossax.models.gemma2.config import Gemma2Config
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.rope_settings import plain_rope, write_rope
from colossax.models.settings import FULL, LOCAL, every_full, first_eos, per_layer, write_kinds

_MLP_NORM = "post_attention_layernorm"

SANDWICH = (
    *(entry for entry in LINKS if _MLP_NORM not in entry.foreign),
    *(
        link(f"model.layers.{{layer}}.{name}.weight", "embed", f"layers/{ours}/scale")
        for name, ours in (
            (_MLP_NORM, "attn_output_norm"),
            ("pre_feedforward_layernorm", "mlp_norm"),
            ("post_feedforward_layernorm", "mlp_output_norm"),
        )
    ),
)
"""Those of Gemma 3 too; OLMo 2's, which norms outputs alone."""

GEMMA_SETTINGS = settings_with(
    SETTINGS,
    setting("tied", "tie_word_embeddings", default=True),
    setting("head_dim", "head_dim", default=256),
    setting("window", "sliding_window", default=4096),
    setting("score_dim", "query_pre_attn_scalar", default=256),
    setting("score_cap", "attn_logit_softcapping", default=None),
    setting("logit_cap", "final_logit_softcapping", default=None),
)
"""Those of Gemma 3 too."""


def read_full(settings: Mapping[str, Any], usual: int) -> dict[str, int]:
    """Our `full_every`, from a list of layers' types, or a number of older files."""
    kinds = per_layer(settings, "layer_types", (LOCAL, FULL))
    if kinds is None:
        return {"full_every": settings.get("sliding_window_pattern", usual)}
    full = [kind == FULL for kind in kinds]
    return {"full_every": every_full("layer_types", full, f"each so many-th as {FULL!r}")}


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain_rope(settings), **read_full(settings, 2), **first_eos(settings)}


def _write(config: Gemma2Config) -> dict[str, Any]:
    return {
        **write_rope(config.rope_theta),
        "layer_types": write_kinds(config.decoder().sees_all),
        "eos_token_id": config.eos,
    }


CONVERSION = Conversion(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config=Gemma2Config,
    settings=(*GEMMA_SETTINGS, setting("max_seq", "max_position_embeddings", default=8192)),
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    links=SANDWICH,
    ignored=IGNORED,
    read=_read,
    write=_write,
)
