"""Shared memory that one warpgroup fills while others read it, a few steps ahead of them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .ops import Ops


@dataclasses.dataclass(frozen=True)
class Stages:
    """Step `i` of a loop uses stage `i % count`; both sides number their steps alike.

    Attributes:
        ops: Of the kernel.
        barriers: As `stage_barriers` describes them, in the kernel.
        count: How many there are.
    """

    ops: Ops
    barriers: Any
    count: int

    def slot(self, step: Any) -> Any:
        """Which stage a step uses."""
        return jax.lax.rem(step, jnp.int32(self.count))

    def _barrier(self, name: str, slot: Any) -> Any:
        barrier = self.barriers[name]
        return barrier if self.count == 1 else barrier.at[slot]

    def open(self) -> None:
        """Every reader says so first: all stages are free."""
        for slot in range(self.count):
            plgpu.barrier_arrive(self._barrier("left", slot))

    def fill(self, step: Any, copies: Iterable[tuple[Any, Any]]) -> None:
        """Start copies from global to shared memory when all readers have left the stage."""
        slot = self.slot(step)
        plgpu.barrier_wait(self._barrier("left", slot))
        for source, target in copies:
            self.ops.copy_in(source, target, self._barrier("filled", slot))

    def arrived(self, step: Any) -> Any:
        """Wait for the copies of a step; its stage."""
        slot = self.slot(step)
        plgpu.barrier_wait(self._barrier("filled", slot))
        return slot

    def leave(self, step: Any) -> None:
        """Say that one reader has read all it needs of a step."""
        plgpu.barrier_arrive(self._barrier("left", self.slot(step)))

    def drain(self, steps: Any) -> None:
        """After `steps` steps were filled: wait until the readers have left them all."""
        for i in range(self.count):
            plgpu.barrier_wait(self._barrier("left", self.slot(steps + i)))


def stage_barriers(count: int, *, copies: int, readers: int) -> dict[str, Any]:
    """Barriers of `count` stages, each filled by `copies` copies for `readers` warpgroups."""
    return {
        "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=count),
        "left": plgpu.Barrier(num_arrivals=readers, num_barriers=count),
    }
