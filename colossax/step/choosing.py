"""How gradients are made and the state is updated under a plan, and who follows the program."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from colossax.config import MeshAxis
from colossax.errors import PlanError
from colossax.sharding import batch_axes
from colossax.step.gradients.accumulate import accumulate
from colossax.step.gradients.method import GradientMethod
from colossax.step.gradients.reduce_once import check_reduce_once, reduce_once
from colossax.step.offloaded.cpu_update import CpuUpdate
from colossax.step.offloaded.disk import DiskTier
from colossax.step.offloaded.streaming import Streaming, check_streamable
from colossax.step.programs import StageUpdate, check_programs
from colossax.step.stages import pipelined, table_of
from colossax.step.updaters import Follower, Updater

if TYPE_CHECKING:
    from colossax.step.step import Step


def gradient_method_of(step: "Step") -> GradientMethod:
    """Whole gradients, reduced over the devices for each microbatch, or once per step.

    Args:
        step: Its plan, model and loss are there.
    """
    if step.bound.mesh.shape[MeshAxis.STAGE] > 1:
        table = functools.partial(table_of, step.bound)
        return pipelined(step.loss_call, step.bound, step.spec.infos, step.trainable, table)
    once = step.bound.plan.batch.reduce_once and batch_axes(step.bound)
    method = reduce_once if once else accumulate
    return method(step.loss_call, step.bound, step.infos, step.trainable)


def updater_of(step: "Step", optimizer: Any) -> Updater | None:
    """Who takes the state further under a plan; None: all parameters are updated at once.

    Args:
        step: Its plan, model, loss and state layout are there.
        optimizer: As it was given.

    Raises:
        PlanError: See `streaming_of` and `check_programs`.
    """
    if step.bound.stage_programs:
        check_reduce_once(step.bound, step.spec.infos)
        check_programs(step.bound, step.spec.infos, optimizer, step.options)
        return StageUpdate(step, optimizer)
    return streaming_of(step, optimizer)


def streaming_of(step: "Step", optimizer: Any) -> Streaming | None:
    """Updates layer by layer, where the plan puts any layer elsewhere: during backward, or after it
    where stages share the layers.

    Args:
        step: Its plan, model, loss and state layout are there.
        optimizer: As it was given.

    Raises:
        PlanError: Layers cannot be updated one by one; or there is no way to get gradients as the
            plan wants them.
    """
    check_reduce_once(step.bound, step.spec.infos)
    if not _updated_by_layer(step):
        return None
    check_streamable(step.bound, step.spec.infos, step.infos, optimizer)
    return Streaming(
        step.loss_call,
        step.bound,
        step.spec.infos,
        step.trainable,
        optimizer,
        step.layout.map_moments,
        step.options.clip_norm,
        gradient_method_of(step) if step.bound.mesh.shape[MeshAxis.STAGE] > 1 else None,
    )


def _updated_by_layer(step: "Step") -> bool:
    """Whether layers are updated one by one; stages do so only where their state is elsewhere."""
    plan = step.bound.plan
    if step.bound.mesh.shape[MeshAxis.STAGE] > 1:
        infos = jax.tree.leaves(step.spec.infos)
        return any(info.on_host or info.optimizer_on_host for info in infos)
    return plan.offload.wanted or any(not s.placement.all_on_device for s in plan.segments)


def followers_of(step: "Step", compiler_options: Any) -> list[Follower]:
    """What the CPU and the disk do once the program has ended, in this order.

    Args:
        step: With its updater.
        compiler_options: For the devices' compiler.

    Raises:
        PlanError: The CPU is given a share of layers that are not there.
    """
    streaming = step.streaming
    share = step.bound.plan.offload.cpu_update
    followers: list[Follower] = []
    if streaming is not None and streaming.on_cpu:
        followers.append(CpuUpdate(streaming, step.layout.shardings, compiler_options))
    elif isinstance(share, float) and share > 0:
        if streaming is None or not any(part.on_host for part in streaming.parts.values()):
            raise PlanError(
                f"plan.offload.cpu_update: found {share}, and no layer has parameters and optimizer"
                " state in host memory; put layers there, or give off or auto"
            )
    if streaming is not None and streaming.on_disk and step.options.disk is not None:
        followers.append(DiskTier(streaming, step.layout.abstract, Path(step.options.disk)))
    return followers
