"""What a layer keeps for its backward pass and what is computed again, by the plan's segments."""

from collections.abc import Callable
from typing import Any

import jax

from colossax.config import Segment
from colossax.errors import PlanError
from colossax.sharding import keeping, recomputing


def checkpointed(fn: Callable, segment: Segment, *, in_loop: bool) -> Callable:
    """`fn`, what its backward pass needs kept or computed again as the segment says.

    Args:
        fn: What is done for a layer.
        segment: Its policy.
        in_loop: Whether it is the body of a loop.

    Raises:
        PlanError: `mlp_share` is still to be found.
    """
    offloaded = sorted(segment.placement.saved_on_host)
    if segment.remat == "none":
        return fn
    share = segment.mlp_share
    if not isinstance(share, float):
        raise PlanError(
            f"segments.mlp_share {share!r}: the share is not known yet; train with"
            " colossax.boost(..., shapes=batch), which finds it, or give a number"
        )

    def marked(*args: Any) -> Any:
        with recomputing(), keeping(share):
            return fn(*args)

    # A loop body is compiled apart from its backward, so nothing can be merged back across.
    policy = _policy(segment.remat, offloaded)
    return jax.checkpoint(marked, policy=policy, prevent_cse=not in_loop)


def _policy(remat: str, offloaded: list[str]) -> Callable:
    """What `remat` keeps on the device, and these names in host memory."""
    policies = jax.checkpoint_policies
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    kept = [] if remat == "full" else [n for n in remat.split("+") if n not in offloaded]
    if offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*kept) if kept else policies.nothing_saveable
