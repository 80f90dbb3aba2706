"""GLM-4-0414's names and layouts in Hugging Face files."""

from colossax.models.conversion import Conversion, link
from colossax.models.glm.convert import GLM_LINKS, GLM_SETTINGS, read_glm, write_glm
from colossax.models.glm4.config import GLM4Config
from colossax.models.llama.convert import IGNORED

_OUTPUT_NORMS = {
    "post_self_attn_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "mlp_output_norm",
}

CONVERSION = Conversion(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    config=GLM4Config,
    settings=GLM_SETTINGS,
    fixed={"hidden_act": ("silu",)},
    links=(
        *GLM_LINKS,
        *(
            link(f"model.layers.{{layer}}.{theirs}.weight", "embed", f"layers/{ours}/scale")
            for theirs, ours in _OUTPUT_NORMS.items()
        ),
    ),
    ignored=IGNORED,
    read=read_glm,
    write=write_glm,
)
