"""Phi-3's names and layouts in Hugging Face files: q, k and v in one, gate and up in one."""

from collections.abc import Mapping
from typing import Any

from colossax.models.conversion import Conversion, link, setting
from colossax.models.llama.convert import IGNORED, LINKS, SETTINGS
from colossax.models.phi3.config import Phi3Config
from colossax.models.rope_settings import read_rope, read_rope_dims, rope_share, write_rope
from colossax.models.settings import first_eos
from colossax.nn import even_head_dim

_LAYER = "model.layers.{layer}"
_APART = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
GATE_UP = link(
    f"{_LAYER}.mlp.gate_up_proj.weight", "(part mlp) embed", "layers/mlp/gate/w", "layers/mlp/up/w"
)
"""That of GLM too."""


def _read(settings: Mapping[str, Any]) -> dict[str, Any]:
    older = settings.get("rope_scaling")
    if isinstance(older, dict) and older.get("type") in ("su", "yarn"):
        # What longrope was called when these models came out.
        settings = {**settings, "rope_scaling": {**older, "type": "longrope"}}
    allowed = ("default", "longrope")
    head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        **read_rope(settings, allowed=allowed, partial=True),
        "rope_dims": read_rope_dims(settings, head_dim),
        **first_eos(settings),
    }


def _write(config: Phi3Config) -> dict[str, Any]:
    head_dim = even_head_dim(config.embed, config.heads)
    share = rope_share(config.rope_dims or head_dim, head_dim)
    return {
        **write_rope(config.rope_theta, config.rope_scaling, share=share),
        "eos_token_id": config.eos,
        "pad_token_id": None,
    }


CONVERSION = Conversion(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    config=Phi3Config,
    settings=(
        *SETTINGS,
        setting("max_seq", "max_position_embeddings", default=4096),
        setting("window", "sliding_window", default=None),
    ),
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    links=(
        *(entry for entry in LINKS if not any(name in entry.foreign for name in _APART)),
        link(
            f"{_LAYER}.self_attn.qkv_proj.weight",
            "(heads|kv_heads|kv_heads head_dim) embed",
            *(f"layers/attn/{name}/w" for name in "qkv"),
        ),
        GATE_UP,
    ),
    ignored=IGNORED,
    read=_read,
    write=_write,
)
