"""What goes together with a drafter in a run, checked without JAX."""

from typing import Any

from colossax.config import MeshAxis
from colossax.errors import InputError, PlanError
from colossax.nn.config.drafter import check_family


def check_drafter(config: Any) -> None:
    """Refuse a `TrainConfig` whose drafter cannot be trained.

    Raises:
        InputError: Target or data are none that a drafter learns from, or more is to be learned.
        PlanError: The plan has stages.
    """
    drafter, data = config.drafter, config.data
    if not drafter:
        return
    others = {
        "adapter.rank": bool(config.adapter),
        "data.masking": data.masking is not None,
        "data.spans": data.spans is not None,
        "data.images": data.images is not None,
        "data.audio": data.audio is not None,
        "z_loss": bool(config.z_loss),
        "sample.prompt": bool(config.sample.prompt),
    }
    found = [name for name, given in others.items() if given]
    if found:
        raise InputError(
            f"drafter.layers: found {drafter.layers} beside {', '.join(found)}; a drafter learns"
            " from text, alone, and continues none by itself: leave the others out"
        )
    check_family(config.model)
    target = config.model.decoder()
    drafter.decoder(target)
    if drafter.text < 1 and (target.logit_cap is not None or target.head_bias):
        raise InputError(
            f"drafter.text: found {drafter.text:g}, and logits of the target are capped or have a"
            " bias, from which no divergence is made here; give drafter.text 1"
        )
    stages = config.plan.mesh.get(MeshAxis.STAGE, 1)
    if stages != 1:
        raise PlanError(
            f"plan.mesh: found stage={stages}, and stages share the layers of one"
            " model, while a drafter is trained beside another; give data, fsdp, tensor or ring"
        )
