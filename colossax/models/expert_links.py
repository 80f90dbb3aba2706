"""Experts' names and layouts in Hugging Face files, as several families have them."""

from collections.abc import Mapping
from typing import Any

from colossax.config import Natural
from colossax.errors import InputError
from colossax.models.conversion import Link, link, setting
from colossax.models.settings import checked

_OURS = "layers/mlp"
_MLP = "model.layers.{layer}.mlp"
_LOSS = 0.001


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
    setting("balance_loss", "router_aux_loss_coef", default=_LOSS),
)


def taught(settings: Mapping[str, Any], loss: float, *, renormalised: bool) -> dict[str, Any]:
    """Our `balance_loss` of a file whose router nothing would teach; else nothing.

    Its tokens take one expert whose weight is 1, and it has no such loss. A decoder refuses that,
    since training would leave the router as it is; what only generates is none the worse for it.

    Args:
        settings: Of config.json.
        loss: That of a file that does not say.
        renormalised: Whether the weights of the chosen sum to 1.
    """
    alone = renormalised and settings.get("num_experts_per_tok") == 1
    return {"balance_loss": loss} if alone and settings.get("router_aux_loss_coef") == 0 else {}


def qwen_taught(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise, of both Qwen families."""
    renormalised = settings.get("norm_topk_prob") is True
    return taught(settings, _LOSS, renormalised=renormalised)


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
