"""Host memory and files, as a search is given them, and what of them is refused before it."""

from typing import TypedDict

from colossax.aot import Target
from colossax.config import Plan
from colossax.errors import PlanError
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.disk import unfiled
from colossax.planner.searching.verifying import Subject


class Tiers(TypedDict):
    """Where layers' arrays may live beside devices.

    Attributes:
        host: Bytes of the host for each device; None: none of it.
        disk: Bytes of a file for each device; None: there is none.
    """

    host: float | None
    disk: float | None


def check_host(plan: Plan, host_gb: float | None, disk_gb: float | None) -> None:
    """Refuse what a search would lose, or knows nothing of.

    Args:
        plan: As it was given.
        host_gb: See `plan_run`.
        disk_gb: Likewise.

    Raises:
        PlanError: There may be a file, and no host memory; something is placed in host memory, and
            none may be used; the plan updates layers in a way that formulas do not know.
    """
    offload, segments = plan.offload, plan.segments
    placed = offload.wanted or any(one.offload != "none" for one in segments)
    if disk_gb is not None and host_gb is None:
        raise PlanError(
            f"--disk-gb: found {disk_gb:g} without --host-gb, and only what has left the devices"
            " can lie in a file; give --host-gb too"
        )
    if host_gb is None and placed:
        raise PlanError(
            "plan.offload: the plan has layers in host memory or updates them one by one, and what"
            " lives there is found where it may be used; give --host-gb (--plan.offload auto beside"
            " --plan auto), or --plan.offload none"
        )
    if host_gb is None:
        return
    if offload.cpu_update != "off":
        raise PlanError(
            f"plan.offload.cpu_update: found {offload.cpu_update}, and what the CPU updates is not"
            " searched; leave it off, and put it over the plan that is found"
        )
    if offload.clipping not in ("stack", "layer"):
        raise PlanError(
            f"plan.offload.clipping: found {offload.clipping}, of which it is not known what it"
            " takes; give stack or layer, and put another over the plan that is found"
        )
    if placed and not offload.auto:
        raise PlanError(
            "plan.offload: layers are in host memory or updated one by one, and --host-gb finds"
            " which of them are to be; leave one of the two out (--plan.offload none)"
        )


def tiers_of(
    subject: Subject,
    profile: ModelProfile,
    plan: Plan,
    target: Target,
    host_gb: float | None,
    disk_gb: float | None,
) -> Tiers:
    """What may be used, for each device.

    Raises:
        PlanError: Layers' arrays cannot live there.
    """
    if host_gb is None:
        return Tiers(host=None, disk=None)
    if profile.moves:
        raise PlanError(f"plan: host memory is to be used, and cannot be: {profile.moves}")
    if disk_gb is None:
        return Tiers(host=host_gb * 1e9, disk=None)
    if reason := no_file(subject, profile, plan, target):
        raise PlanError(f"--disk-gb: {reason}; leave it out")
    return Tiers(host=host_gb * 1e9, disk=disk_gb * 1e9)


def no_file(subject: Subject, profile: ModelProfile, plan: Plan, target: Target) -> str:
    """Why layers' optimizer state cannot lie in a file; empty where it can."""
    if plan.offload.clipping != "stack":
        return f"a file does not go with plan.offload.clipping {plan.offload.clipping}"
    if subject.config is not None and subject.config.optimizer.averages:
        return "the optimizer's averages of parameters, which are evaluated, would lie there too"
    return unfiled(profile, target)
