"""The largest microbatch that fits a target."""

import dataclasses
from collections.abc import Callable

from colossax.aot import (
    Target,
    target_devices,
)
from colossax.config import BatchConfig
from colossax.planner.compiled import compiled_step, usable_bytes
from colossax.sharding import batch_axes
from colossax.tasks import TrainConfig


def largest_microbatch(
    config: TrainConfig, target: Target, tell: Callable[[str], None] = lambda _: None
) -> int | None:
    """The most rows of each device at a time that fit, by compiling; None when not even one does.

    Doubles until it does not fit, then halves the interval; a global batch of twice as many rows
    per device is compiled, so that gradients are accumulated as they would be.

    Args:
        config: The run; its global batch is replaced.
        target: Where.
        tell: Called with a line after each compilation.
    """

    def fits(rows: int) -> bool:
        with_rows = _with_microbatch(config, target, rows)
        needed = compiled_step(with_rows, target)[1].device_bytes
        verdict = "fits" if needed <= usable_bytes(target) else "does not fit"
        tell(f"{rows} rows per device: {needed / 2**30:.1f} GiB, {verdict}")
        return needed <= usable_bytes(target)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low or None


def _with_microbatch(config: TrainConfig, target: Target, rows: int) -> TrainConfig:
    batch = BatchConfig(microbatch=rows, reduce_once=config.plan.batch.reduce_once)
    plan = config.plan.replace(batch=batch)
    # Along the batch are at most as many devices as in all; twice the rows make two microbatches.
    bound = plan.bind(target_devices(target))
    devices = bound.size(sorted(batch_axes(bound)))
    data = dataclasses.replace(config.data, global_batch=2 * rows * devices)
    return config.replace(plan=plan, data=data)
