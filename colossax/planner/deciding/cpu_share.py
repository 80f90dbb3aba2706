"""How many of the layers in host memory the CPU updates: `plan.offload.cpu_update` auto."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from colossax.config import Plan
from colossax.offload import Rates, cpu_share, load_rates
from colossax.optim import DimsOptimizer, is_layerwise
from colossax.typing import NamedDims

CPU_UPDATE = "plan.offload.cpu_update auto"
"""How lines of what was decided begin."""

_LOG = logging.getLogger(__name__)


def with_cpu_share(
    plan: Plan,
    optimizer: Any,
    devices: Sequence[jax.Device],
    *,
    reachable: Callable[[], bool] = lambda: True,
    rates: Callable[[str], Rates | None] = load_rates,
) -> tuple[Plan, str | None]:
    """The plan with a share in place of `offload.cpu_update` auto, and why, in one line.

    Args:
        plan: Unchanged, without a line, where the share is given.
        optimizer: What it keeps of a parameter decides how much would travel.
        devices: Rates are those of their kind.
        reachable: Whether there is any layer that the CPU could update.
        rates: What was measured of a kind of device.

    Raises:
        InputError: The file of rates is damaged.
    """
    if plan.offload.cpu_update != "auto":
        return plan, None
    share, line = _measured_share(plan, optimizer, rates, devices[0])
    if share and not reachable():
        share, line = 0.0, "off, no layer has parameters and optimizer state in host memory"
    line = f"{CPU_UPDATE}: {line}"
    _LOG.info(line)
    return plan.replace(offload=dataclasses.replace(plan.offload, cpu_update=share)), line


def _measured_share(
    plan: Plan, optimizer: Any, rates_of: Callable[[str], Rates | None], device: jax.Device
) -> tuple[float, str]:
    if jax.process_count() > 1:
        return 0.0, "off, several processes hold parts of each layer"
    if not is_layerwise(optimizer):
        return 0.0, "off, the optimizer does not update layers one by one"
    rates = rates_of(device.device_kind)
    if rates is None:
        return 0.0, (
            f"off, nothing was measured for '{device.device_kind}'; colossax bench offload does it"
        )
    share = cpu_share(rates, bytes_per_direction(optimizer, plan.precision.params))
    if not share:
        return 0.0, "off, by the rates that were measured it does not pay"
    return share, f"the CPU updates {share:.0%} of the layers in host memory, as rates say"


def bytes_per_direction(optimizer: DimsOptimizer, dtype: Any) -> float:
    """What a device fetches, and brings back, to update a parameter of a matrix."""
    matrix = jax.ShapeDtypeStruct((64, 64), dtype)
    dims = {"matrix": NamedDims("matrix", (None, None))}
    state = jax.eval_shape(optimizer(dims).init, {"matrix": matrix})
    moved = [matrix, *(leaf for leaf in jax.tree.leaves(state) if leaf.ndim)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in moved) / matrix.size
