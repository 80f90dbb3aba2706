"""Experts' names and layouts in Hugging Face files, as several families have them."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Natural
from colossax.errors import InputError
from colossax.models.conversion import Link, link, setting
from colossax.models.settings import checked

_OURS = "layers/mlp"
_MLP = "model.layers.{layer}.mlp"


def expert_links(where: str, names: Mapping[str, str], router: str) -> tuple[Link, ...]:
    """Links of a router and of experts that are tensors each.

    Args:
        where: What is before their names, with `{layer}`.
        names: Of `gate`, `up` and `down`.
        router: Name of the router.
    """
    into, out = "expert_mlp expert_embed", "expert_embed expert_mlp"
    return (
        link(f"{where}.{router}.weight", "scores embed", f"{_OURS}/router/w"),
        *(
            link(
                f"{where}.experts.{{expert}}.{foreign}.weight",
                out if ours == "down" else into,
                f"{_OURS}/{ours}",
            )
            for ours, foreign in names.items()
        ),
    )


QWEN_LINKS = (
    *expert_links(_MLP, {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, "gate"),
    link(f"{_MLP}.shared_expert.gate_proj.weight", "mlp embed", f"{_OURS}/shared/gate/w"),
    link(f"{_MLP}.shared_expert.up_proj.weight", "mlp embed", f"{_OURS}/shared/up/w"),
    link(f"{_MLP}.shared_expert.down_proj.weight", "embed mlp", f"{_OURS}/shared/down/w"),
    link(f"{_MLP}.shared_expert_gate.weight", "gated embed", f"{_OURS}/shared_gate/w"),
)
"""Those of Qwen 2 and Qwen 3 with experts, and of OLMoE."""

QWEN_SETTINGS = (
    setting("expert_mlp", "moe_intermediate_size"),
    setting("choices", "num_experts_per_tok"),
    setting("renormalise", "norm_topk_prob", default=False),
    setting("every", "decoder_sparse_step", default=1),
    setting("balance_loss", "router_aux_loss_coef", default=0.001),
)


def check_mlp_only(settings: Mapping[str, Any]) -> None:
    """Refuse single layers without experts.

    Raises:
        InputError: With their numbers.
    """
    dense = checked("mlp_only_layers", settings.get("mlp_only_layers"), list | None) or []
    if dense:
        shown = ", ".join(str(checked("mlp_only_layers", one, Natural)) for one in dense[:5])
        raise InputError(
            f"config.json: mlp_only_layers {shown} are not supported; only an empty list is, with"
            " decoder_sparse_step for the layers that have experts"
        )
