"""Transfers to and from host memory across iterations of a loop: `plan.offload.pipelined` auto."""

import dataclasses
import logging
from collections.abc import Callable

import jax
import jaxlib

from colossax.config import PIPELINED_OPTION, Plan
from colossax.offload import Rates, load_rates

PIPELINED = "plan.offload.pipelined auto"
"""How lines of what was decided begin."""

_LOG = logging.getLogger(__name__)


def with_pipelined(
    plan: Plan,
    platform: str,
    device_kind: str,
    *,
    rates: Callable[[str], Rates | None] = load_rates,
) -> tuple[Plan, str | None]:
    """The plan with the compiler's option in place of `auto`, or without, and why, in one line.

    It is on only where `colossax bench offload` found losses that it does not change, on this kind
    of device and with this jaxlib: it once broke convergence (openxla/xla #45393, #37979).

    Args:
        plan: Unchanged, without a line, where it is `off`.
        platform: Of the devices.
        device_kind: Likewise; the verdict is that of this kind.
        rates: What was measured of a kind of device.

    Raises:
        InputError: The file of rates is damaged.
    """
    if plan.offload.pipelined != "auto":
        return plan, None
    offload = dataclasses.replace(plan.offload, pipelined="off")
    plan = plan.replace(offload=offload)
    why_off = _why_off(platform, device_kind, rates)
    line = f"{PIPELINED}: " + (f"off, {why_off}" if why_off else "on, as its losses were the same")
    _LOG.info(line)
    if why_off is None:
        plan = plan.replace(compiler_options={**plan.compiler_options, PIPELINED_OPTION: True})
    return plan, line


def _why_off(platform: str, kind: str, rates_of: Callable[[str], Rates | None]) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"it is for GPUs, and the device is '{kind}'"
    if jax.process_count() > 1:
        return "several processes may have tested it with different results"
    rates = rates_of(kind)
    if rates is None or rates.pipelined is None:
        return f"it was not tested on '{kind}'; colossax bench offload does it"
    tested = rates.pipelined
    if tested.jaxlib != jaxlib.__version__:
        return (
            f"it was tested with jaxlib {tested.jaxlib}, this is {jaxlib.__version__}; colossax"
            " bench offload tests it again"
        )
    return None if tested.passed else f"it changed losses when it was tested, {tested.shown}"
