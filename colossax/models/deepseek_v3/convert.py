"""DeepSeek V3's names and layouts in Hugging Face files."""

from typing import Any

from colossax.models.conversion import Conversion, link, setting
from colossax.models.deepseek_v2.convert import (
    LATENT_FIXED,
    LATENT_LINKS,
    LATENT_SETTINGS,
    read_latent,
    write_latent,
)
from colossax.models.deepseek_v3.config import DeepSeekV3Config
from colossax.models.llama.convert import IGNORED

# The published model has, behind its 61 layers, one that predicts a further token in training.
_FURTHER = r"model\.layers\.61\..*"


def _write(config: DeepSeekV3Config) -> dict[str, Any]:
    return {**write_latent(config), "num_nextn_predict_layers": 0}


CONVERSION = Conversion(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=DeepSeekV3Config,
    settings=(
        *LATENT_SETTINGS,
        setting("first_dense", "first_k_dense_replace", default=3),
        setting("scale", "routed_scaling_factor", default=2.5),
        setting("groups", "n_group", default=8),
        setting("kept_groups", "topk_group", default=4),
        setting("renormalise", "norm_topk_prob", default=True),
        setting("interleaved", "rope_interleave", default=True),
        setting("max_seq", "max_position_embeddings", default=4096),
        setting("balance_loss", "aux_loss_alpha", default=0.0001),
    ),
    fixed={
        **LATENT_FIXED,
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "seq_aux": (True,),
    },
    links=(
        *LATENT_LINKS,
        link("model.layers.{layer}.mlp.gate.e_score_correction_bias", "scores", "layers/mlp/bias"),
    ),
    ignored=(*IGNORED, _FURTHER),
    read=read_latent,
    write=_write,
)
