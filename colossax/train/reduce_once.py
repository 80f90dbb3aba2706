"""Gradients that are summed over devices once per step, not for each microbatch."""

from typing import Any

import jax

from colossax.config import BoundPlan
from colossax.errors import PlanError
from colossax.sharding import batch_axes, param_sharding


def check_reduce_once(bound: BoundPlan, infos: Any) -> None:
    """Refuse to accumulate whole gradients of parameters that no device has whole.

    Raises:
        PlanError: Of them, or of an attention that cannot run on each device's own rows.
    """
    held = batch_axes(bound)
    batch = bound.plan.batch
    if not batch.reduce_once or not held:
        return
    several = batch.accumulation > 1 or batch.microbatch is not None
    kernel = bound.plan.attention.kernel
    if several and kernel in ("cudnn", "mosaic"):
        raise PlanError(
            f"plan.attention.kernel '{kernel}' cannot run under plan.batch.reduce_once with several"
            " microbatches; give 'auto', or switch reduce_once off as preset zero2 does"
        )
    for info in jax.tree.leaves(infos):
        entries = param_sharding(bound, "params", info).spec
        taken = {a for e in entries if e for a in ((e,) if isinstance(e, str) else e)} & held
        if taken:
            raise PlanError(
                f"plan.batch.reduce_once: {info.path} is split over '{min(taken)}',"
                f" which splits the batch; switch it off, or use a preset such as zero2"
            )
