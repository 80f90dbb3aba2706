"""`--plan auto`: the fastest plan found for the devices that are there, or for a target."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from colossax.aot import Target, gpu_keys, parse_target
from colossax.config import MESH_AXES, Plan
from colossax.errors import InputError, PlanError
from colossax.inference.engine.sizing import SEATS, SHARE, SLOTS
from colossax.offload.limits import device_budget, host_budget
from colossax.pipeline.measured import LinkTimes
from colossax.planner.searching import AXES, Answer, Asked, Subject, plan_run
from colossax.planner.searching.asked import NOTHING_ASKED
from colossax.planner.searching.calibrated import calibrated, is_called
from colossax.planner.searching.verifying import Tell, compiled
from colossax.planner.serving import Served, Wish, plan_serving
from colossax.planner.telling.plans import found_words
from colossax.planner.telling.serving_plans import found_serving_words

AUTO = "auto"
"""In place of a plan's file."""


def target_here(devices: Sequence[Any]) -> Target:
    """The target that these devices are.

    A node is what NVLink connects; between nodes InfiniBand is assumed.

    Args:
        devices: Of all processes, as JAX gives them.

    Raises:
        InputError: They are no GPUs, of several kinds, of one whose speed is not known, or not as
            many on each node.
    """
    kinds = sorted({device.device_kind for device in devices})
    remedy = (
        "; find a plan for GPUs with colossax plan RECIPE --target h100:1x8 --out plan.json, and"
        " give --plan plan.json"
    )
    if devices[0].platform != "gpu":
        raise InputError(
            f"--plan auto: there are {len(devices)} {devices[0].platform} devices, for which"
            f" nothing can be compiled ahead and whose speed is not known{remedy}"
        )
    found = [key for key in gpu_keys() if is_called(parse_target(f"{key}:1x1").gpu.name, kinds[0])]
    if len(kinds) > 1 or not found:
        raise InputError(
            f"--plan auto: the devices are {' and '.join(kinds)}, and plans are found for GPUs of"
            f" one kind, of {', '.join(gpu_keys())}{remedy}"
        )
    nodes = sorted(getattr(one, "slice_index", one.process_index) for one in devices)
    counts = {len(list(same)) for _, same in itertools.groupby(nodes)}
    if len(counts) > 1:
        raise InputError(
            f"--plan auto: nodes have {' and '.join(map(str, sorted(counts)))} of the devices, and"
            f" plans are found for as many on each; give --devices {min(counts)}, or a plan"
        )
    return parse_target(f"{found[0]}:{len(set(nodes))}x{counts.pop()}")


def find_plan(
    subject: Subject,
    plan: Plan,
    target: Target,
    *,
    mesh_given: bool = False,
    over: Callable[[Plan], Plan] = lambda plan: plan,
    memory: int | None = None,
    measured: LinkTimes | None = None,
    tell: Tell = lambda _: None,
) -> Plan:
    """The fastest plan that fits a target, with what is given by hand over it.

    Args:
        subject: What is trained.
        plan: Precision, kernels and all that is not searched; `offload.device_gb` is the budget of
            a device. With `offload.auto` layers' arrays may live in host memory: in as much of it
            as `offload.host_gb` says, or as is free.
        target: Where.
        mesh_given: Whether the plan's mesh is to hold.
        over: Puts what is given by hand over the plan that was found. Where that changes it, the
            changed plan is compiled too.
        memory: Bytes that can be allocated on a device, where it is there to be asked.
        measured: Links and rates of such devices, where they were measured.
        tell: Called with lines of progress, and with the plan in words.

    Raises:
        PlanError: Nothing fits; what is given by hand makes it too large, or is refused.
        InputError: See `plan_run`.
    """
    budgets = {"auto": False, "device_gb": None, "host_gb": None}
    offload = dataclasses.replace(plan.offload, **budgets)
    known = target.gpu.memory_bytes if memory is None else min(memory, target.gpu.memory_bytes)
    rates = None
    if measured is not None:
        rates = calibrated(measured, target, plan, "plan auto, rates as bench links has them")
        tell(rates.line)
    host_gb = _host_gb(plan, target, there=memory is not None)
    answer = plan_run(
        subject,
        plan.replace(offload=offload),
        target,
        asked=_pinned(plan, target) if mesh_given else NOTHING_ASKED,
        device_gb=device_budget(plan.offload.device_gb, known) / 1e9,
        host_gb=host_gb,
        rates=rates,
        tell=tell,
    )
    tell(f"plan auto, {target.name}: {found_words(answer)}")
    changed = over(answer.best)
    if changed != answer.best:
        _check_changed(subject, changed, target, answer, host_gb, tell)
    return changed


def _host_gb(plan: Plan, target: Target, *, there: bool) -> float | None:
    """Of the host's memory, in 1e9 bytes for each device; None where none may be used.

    Raises:
        PlanError: More is given than is free, or how much a host has is not known.
    """
    if not plan.offload.auto:
        return None
    if not there and plan.offload.host_gb is None:
        raise PlanError(
            f"plan.offload.host_gb: how much memory the hosts of {target.name} have is not known;"
            " give how much there is for each GPU, as in --plan.offload.host_gb 96"
        )
    devices = jax.devices() if there else []
    return host_budget(plan.offload.host_gb, devices, None if there else target) / 1e9


def for_requests(count: int, longest: int, limit: int) -> dict[str, Any]:
    """Seats, and tokens of a request, of engines for requests that are all known; see `sizes_for`.

    Args:
        count: Of them.
        longest: Tokens of the longest.
        limit: That the model can.
    """
    seats = 1 << (min(count, SEATS) - 1).bit_length()
    context = min(-(-longest // SLOTS) * SLOTS, limit)
    return {"seats": seats, "of_each": count > SEATS, "context": context}


def find_serving_plan(
    served: Served,
    plan: Plan,
    target: Target,
    *,
    wish: Wish,
    mesh_given: bool = False,
    memory: int | None = None,
    tell: Tell = lambda _: None,
) -> Plan:
    """The plan of most tokens a second that fits a target.

    Args:
        served: What is served.
        plan: Precision, kernels and all that is not searched.
        target: Where.
        wish: What is asked of the engine.
        mesh_given: Whether the plan's mesh is to hold.
        memory: See `find_plan`.
        tell: Likewise.

    Raises:
        PlanError, InputError: See `plan_serving`.
    """
    known = target.gpu.memory_bytes if memory is None else min(memory, target.gpu.memory_bytes)
    answer = plan_serving(
        served,
        plan,
        target,
        wish=dataclasses.replace(wish, asked=_pinned(plan, target)) if mesh_given else wish,
        device_gb=SHARE * known / 1e9,
        tell=tell,
    )
    tell(f"plan auto, {target.name}: {found_serving_words(answer)}")
    return answer.best.plan


def _pinned(plan: Plan, target: Target) -> Asked:
    """The sizes of a mesh that is given.

    Raises:
        PlanError: It has an axis that is not searched, or is not of this many devices.
    """
    sizes = plan.mesh_sizes(target.size)
    for axis in MESH_AXES:
        if axis not in AXES and sizes[axis] > 1:
            raise PlanError(
                f"plan.mesh: axis '{axis}' is given, which --plan auto does not search yet; leave"
                " it out, or give the whole plan by hand"
            )
    return Asked(sizes={axis.value: sizes[axis] for axis in AXES})


def _check_changed(
    subject: Subject,
    changed: Plan,
    target: Target,
    answer: Answer,
    host_gb: float | None,
    tell: Tell,
) -> None:
    """Refuse a plan that what is given by hand makes too large.

    Raises:
        PlanError: It is, or the library refuses it.
    """
    (found,) = compiled(subject, [changed], target, 1)
    said = "plan auto, with what is given by --plan.* put over it: "
    if "refused" in found:
        raise PlanError(said + found["refused"])
    total = found["device_bytes"]["total"]
    if total > answer.room:
        raise PlanError(
            f"{said}{total / 2**30:.2f} GiB compiled, of {answer.room / 2**30:.2f} that a step may"
            " take; leave it out, or give the mesh too (--plan.mesh)"
        )
    there = found["host_bytes"]
    if host_gb is not None and there > host_gb * 1e9:
        raise PlanError(
            f"{said}{there / 1e9:.2f} GB of the host for each device, of {host_gb:.2f} that it may"
            " take; leave it out, or give more (--plan.offload.host_gb)"
        )
    tell(f"{said}{total / 2**30:.2f} GiB compiled, fits")
